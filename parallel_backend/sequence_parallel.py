"""Attention over a sequence that several ranks share: Ulysses' change of sharding, and ring attention.

Shape letters: B batch entries, S tokens of all ranks of the axis, s tokens of this rank, H heads, h heads of this rank,
D head size. Neither tokens nor heads need be the same number on every rank.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from .collectives import Exchange, start_all_to_all, start_shift
from .compression import Codec, PackedExchange
from .kernels import AttendLse
from .layout import Span, split
from .mesh import Axis
from .traffic import Traffic


def start_sequence_to_heads(
    q_BsHD: torch.Tensor,
    k_BsHD: torch.Tensor,
    v_BsHD: torch.Tensor,
    lengths: Sequence[int],
    spans: Sequence[Span],
    axis: Axis,
    traffic: Traffic,
    codec: Codec | None = None,
) -> Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Ulysses (arXiv 2309.14509), before attention: three [B, s, H, D] -> three [B, S, h, D], once the result is called.

    `lengths[j]`: tokens of rank j; `spans[j]`: the heads that it gets. The tokens of the result stand rank after rank. One
    all-to-all carries q, k and v, since on slow links the number of messages counts.
    """
    batch, own, _, size = q_BsHD.shape
    here = len(spans[axis.index])
    send = [3 * batch * own * len(span) * size for span in spans]
    flat = q_BsHD.new_empty(sum(send))
    for span, part in zip(spans, flat.split(send), strict=True):
        part = part.view(own, 3, batch, len(span), size)
        for index, x in enumerate((q_BsHD, k_BsHD, v_BsHD)):
            part[:, index] = x[:, :, span.slice].transpose(0, 1)
    receive = [3 * batch * length * here * size for length in lengths]
    exchange = _start(codec, size)(flat, send, receive, axis, traffic)

    def finish() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = exchange.wait().view(sum(lengths), 3, batch, here, size)
        return tuple(rows[:, i].transpose(0, 1) for i in range(3))

    return finish


def start_heads_to_sequence(
    part_BShD: torch.Tensor,
    out_BsHD: torch.Tensor,
    lengths: Sequence[int],
    spans: Sequence[Span],
    axis: Axis,
    traffic: Traffic,
    codec: Codec | None = None,
) -> Callable[[], None]:
    """Ulysses, after attention, the inverse: once the result is called, `out_BsHD` [B, s, H, D] has the heads `spans`."""
    batch, _, here, size = part_BShD.shape
    own = lengths[axis.index]
    send = [length * batch * here * size for length in lengths]
    receive = [own * batch * len(span) * size for span in spans]
    exchange = _start(codec, size)(part_BShD.transpose(0, 1).reshape(-1), send, receive, axis, traffic)

    def finish() -> None:
        for span, part in zip(spans, exchange.wait().split(receive), strict=True):
            out_BsHD[:, :, span.slice] = part.view(own, batch, len(span), size).transpose(0, 1)

    return finish


def _start(codec: Codec | None, size: int) -> Callable[..., Exchange | PackedExchange]:
    return start_all_to_all if codec is None else functools.partial(codec.start_all_to_all, size)


def head_groups(heads: int, ranks: int, groups: int) -> list[list[Span]]:
    """By group and rank: the heads that the rank gets. None is empty where a rank has as many heads as there are groups."""
    by_rank = [split(own, groups) for own in split(Span(0, heads), ranks)]
    return [[parts[group] for parts in by_rank] for group in range(groups)]


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
