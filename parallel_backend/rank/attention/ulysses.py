"""Ulysses' all-to-all: from this rank's tokens with all heads to all tokens with this rank's heads, and back.

Ranks may have different numbers of tokens and heads.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from parallel_backend.core.spans import Span, split
from parallel_backend.rank.comm.collectives import start_all_to_all
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfer_codec import Codec
from parallel_backend.rank.comm.transfers import Traffic

HEAD_GROUPS = {"cuda": 2, "cpu": 1}
"""Head groups per Ulysses rank, by device. One group's all-to-all overlaps another group's attention.

One on a CPU: the cores that would compute also move the data, so nothing overlaps.
"""

LEAST_WORK = 1 << 14
"""Least batch entries x query tokens x heads of a head group, to fill a large GPU: 128 multiprocessors, tiles of 128."""


def start_sequence_to_heads(
    tensors_BsHD: Sequence[torch.Tensor],
    tokens: Sequence[Sequence[int]],
    spans: tuple[Span, ...],
    axis: Axis,
    traffic: Traffic,
    codec: Codec | None = None,
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Ulysses (arXiv 2309.14509) before attention: starts the all-to-all from tokens to heads.

    Returns a function that waits for it and returns each tensor as [B, S, h, D], tokens in rank order. `tensors_BsHD`:
    queries, keys and values, or some of them. `tokens[i][j]`: tokens of tensor i on rank j. `spans[j]`: heads that rank j
    gets.
    """
    tokens = [list(of_tensor) for of_tensor in tokens]
    if any(of_tensor != tokens[0] for of_tensor in tokens):
        return _start_apart(tensors_BsHD, tokens, spans, axis, traffic, codec)
    # One all-to-all carries all tensors, since a slow link costs by the message. Tokens are the first axis of every part, so
    # that the received parts of all ranks, one behind the other, are one tensor of S tokens.
    count = len(tensors_BsHD)
    batch, length, all_heads, size = tensors_BsHD[0].shape
    heads = len(spans[axis.index])
    send = [count * batch * length * len(span) * size for span in spans]
    if are_even(spans, all_heads):
        flat_N = torch.stack([_of_ranks(x, spans) for x in tensors_BsHD], dim=2).view(-1)
    else:
        flat_N = tensors_BsHD[0].new_empty(sum(send))
        for span, part_n in zip(spans, flat_N.split(send), strict=True):
            rows = part_n.view(length, count, batch, len(span), size)
            for index, x_BsHD in enumerate(tensors_BsHD):
                rows[:, index] = x_BsHD[:, :, span.slice].transpose(0, 1)
    receive = [count * batch * rank_tokens * heads * size for rank_tokens in tokens[0]]
    wait = _start(codec, size, flat_N, send, receive, axis, traffic)

    def finish() -> tuple[torch.Tensor, ...]:
        rows = wait().view(sum(tokens[0]), count, batch, heads, size)
        return tuple(rows[:, index].transpose(0, 1) for index in range(count))

    return finish


def _start_apart(
    tensors_BsHD: Sequence[torch.Tensor],
    tokens: Sequence[Sequence[int]],
    spans: tuple[Span, ...],
    axis: Axis,
    traffic: Traffic,
    codec: Codec | None,
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """As `start_sequence_to_heads` where tensors differ in tokens: a rank's parts of all tensors are sent in a row."""
    batch, _, _, size = tensors_BsHD[0].shape
    heads = len(spans[axis.index])
    parts = [torch.cat([x[:, :, span.slice].transpose(0, 1).reshape(-1) for x in tensors_BsHD]) for span in spans]
    of_ranks = list(zip(*tokens, strict=True))
    receive = [batch * sum(of_rank) * heads * size for of_rank in of_ranks]
    wait = _start(codec, size, torch.cat(parts), [len(part) for part in parts], receive, axis, traffic)

    def finish() -> tuple[torch.Tensor, ...]:
        received = []
        for part_n, of_rank in zip(wait().split(receive), of_ranks, strict=True):
            rows_BshD = part_n.view(sum(of_rank), batch, heads, size).transpose(0, 1)
            received.append(rows_BshD.split(of_rank, dim=1))
        return tuple(torch.cat(of_tensor, dim=1) for of_tensor in zip(*received, strict=True))

    return finish


def start_heads_to_sequence(
    part_BShD: torch.Tensor,
    out_BsHD: torch.Tensor,
    lengths: Sequence[int],
    spans: tuple[Span, ...],
    axis: Axis,
    traffic: Traffic,
    codec: Codec | None = None,
) -> Callable[[], None]:
    """Ulysses after attention, the inverse. Starts the transfer. Call the result to fill the heads `spans` of `out_BsHD`.

    `lengths[j]`: query tokens of rank j.
    """
    batch, _, heads, size = part_BShD.shape
    length = lengths[axis.index]
    send = [rank_tokens * batch * heads * size for rank_tokens in lengths]
    receive = [length * batch * len(span) * size for span in spans]
    wait = _start(codec, size, part_BShD.transpose(0, 1).reshape(-1), send, receive, axis, traffic)

    def finish() -> None:
        if are_even(spans, out_BsHD.shape[2]):
            _of_ranks(out_BsHD, spans).copy_(wait().view(len(spans), length, batch, heads, size))
            return
        for span, part_n in zip(spans, wait().split(receive), strict=True):
            out_BsHD[:, :, span.slice] = part_n.view(length, batch, len(span), size).transpose(0, 1)

    return finish


@functools.lru_cache
def are_even(spans: tuple[Span, ...], heads: int) -> bool:
    """Whether the ranks' spans are equally long and heads / ranks apart. `_of_ranks` then is a view of them all."""
    apart, rest = divmod(heads, len(spans))
    return not rest and all(span == spans[0].shift(rank * apart) for rank, span in enumerate(spans))


def _of_ranks(x_BsHD: torch.Tensor, spans: tuple[Span, ...]) -> torch.Tensor:
    """View [rank, s, B, h, D] of even spans of heads. Made in one go: with fast devices the host's time is what counts."""
    (batch, tokens, heads, size), (by_entry, by_token, by_head, by_channel) = x_BsHD.shape, x_BsHD.stride()
    ranks, span = len(spans), spans[0]
    return x_BsHD.as_strided(
        (ranks, tokens, batch, len(span), size),
        (heads // ranks * by_head, by_token, by_entry, by_head, by_channel),
        x_BsHD.storage_offset() + span.start * by_head,
    )


def _start(
    codec: Codec | None, size: int, x_N: torch.Tensor, send: list[int], receive: list[int], axis: Axis, traffic: Traffic
) -> Callable[[], torch.Tensor]:
    if codec is None:
        return start_all_to_all(x_N, send, receive, axis, traffic).wait
    return codec.start_all_to_all(size, x_N, send, receive, axis, traffic)


def groups_of(q_BQHD: torch.Tensor, tokens: int, heads: int) -> int:
    """Into how many groups Ulysses ranks divide their heads.

    `heads`: of the rank that has the fewest. `tokens`: query tokens of all Ulysses ranks.
    """
    groups = HEAD_GROUPS[q_BQHD.device.type]
    work = len(q_BQHD) * tokens * (heads // groups)
    return 1 if heads < groups or (q_BQHD.is_cuda and work < LEAST_WORK) else groups


@functools.lru_cache
def head_groups(heads: int, ranks: int, groups: int) -> tuple[tuple[Span, ...], ...]:
    """The `heads` of Ulysses ranks by group and rank. No group is empty if each rank has `groups` heads."""
    return tuple(zip(*(split(of_rank, groups) for of_rank in split(Span(0, heads), ranks)), strict=True))
