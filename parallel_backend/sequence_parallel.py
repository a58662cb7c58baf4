"""Attention over a sequence that several ranks share: Ulysses' change of sharding, and ring attention.

Shape letters: B batch entries, S tokens of all ranks of the axis, s tokens of this rank, H heads, h heads of this rank,
D head size. Neither tokens nor heads need be the same number on every rank.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from .collectives import all_to_all, start_shift
from .compression import Codec
from .kernels import AttendLse
from .layout import Span, split
from .mesh import Axis
from .traffic import Traffic


def sequence_to_heads(
    q_BsHD: torch.Tensor,
    k_BsHD: torch.Tensor,
    v_BsHD: torch.Tensor,
    lengths: Sequence[int],
    axis: Axis,
    traffic: Traffic,
    codec: Codec | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ulysses (arXiv 2309.14509), before attention: three [B, s, H, D] -> three [B, S, h, D].

    `lengths[j]`: tokens of rank j. The tokens of the result stand rank after rank. One all-to-all carries q, k and v,
    since on slow links the number of messages counts.
    """
    batch, own, heads, size = q_BsHD.shape
    spans = split(Span(0, heads), axis.size)
    here = len(spans[axis.index])
    send = [3 * batch * own * len(span) * size for span in spans]
    flat = q_BsHD.new_empty(sum(send))
    for span, part in zip(spans, flat.split(send), strict=True):
        part = part.view(own, 3, batch, len(span), size)
        for index, x in enumerate((q_BsHD, k_BsHD, v_BsHD)):
            part[:, index] = x[:, :, span.slice].transpose(0, 1)
    receive = [3 * batch * length * here * size for length in lengths]
    rows = _exchange(codec, size)(flat, send, receive, axis, traffic).view(sum(lengths), 3, batch, here, size)
    return tuple(rows[:, i].transpose(0, 1) for i in range(3))


def heads_to_sequence(
    out_BShD: torch.Tensor,
    lengths: Sequence[int],
    heads: int,
    axis: Axis,
    traffic: Traffic,
    codec: Codec | None = None,
) -> torch.Tensor:
    """Ulysses, after attention: [B, S, h, D] -> [B, s, H, D] with H = `heads`, the inverse of `sequence_to_heads`."""
    batch, _, here, size = out_BShD.shape
    own = lengths[axis.index]
    spans = split(Span(0, heads), axis.size)
    send = [length * batch * here * size for length in lengths]
    receive = [own * batch * len(span) * size for span in spans]
    flat = _exchange(codec, size)(out_BShD.transpose(0, 1).reshape(-1), send, receive, axis, traffic)
    out = flat.new_empty(batch, own, heads, size)
    for span, part in zip(spans, flat.split(receive), strict=True):
        out[:, :, span.slice] = part.view(own, batch, len(span), size).transpose(0, 1)
    return out


def _exchange(codec: Codec | None, size: int) -> Callable[..., torch.Tensor]:
    return all_to_all if codec is None else functools.partial(codec.all_to_all, size)


def ring_attention(
    q_BsHD: torch.Tensor,
    k_BsHD: torch.Tensor,
    v_BsHD: torch.Tensor,
    lengths: Sequence[int],
    masks: Sequence[torch.Tensor | None],
    attend: AttendLse,
    scale: float | None,
    overlap: bool,
    axis: Axis,
    traffic: Traffic,
) -> torch.Tensor:
    """Ring attention (arXiv 2310.01889): keys and values go round, [B, s, H, D] of queries stay and see all S tokens.

    `lengths[j]`, `masks[j]` [B, lengths[j]] bool or None: tokens of rank j and which of them may be seen. With
    `overlap` the next block travels while this one is attended to.
    """
    block = torch.stack((k_BsHD, v_BsHD))
    out = lse = None
    for step in range(axis.size):
        source = (axis.index - step) % axis.size
        shift = None
        if step < axis.size - 1:
            shift = start_shift(block, lengths[(source - 1) % axis.size], 2, axis, traffic)
            if not overlap:
                block_next = shift.wait()
        if lengths[source] and len(q_BsHD[0]):
            part = attend(q_BsHD, block[0], block[1], masks[source], scale)
            out, lse = part if out is None else merge((out, lse), part)
        if shift is not None:
            block = shift.wait() if overlap else block_next
    return q_BsHD.clone() if out is None else out.to(q_BsHD.dtype)


def merge(
    one: tuple[torch.Tensor, torch.Tensor], two: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys, from (out [B, q, H, D], log-sum-exp [B, q, H]) over each; in float32."""
    # Where neither has a key the difference is -inf + inf, and both outputs are zeros.
    weight = torch.sigmoid(two[1] - one[1]).nan_to_num_(0.0)[..., None]
    return torch.lerp(one[0].float(), two[0].float(), weight), torch.logaddexp(one[1], two[1])
