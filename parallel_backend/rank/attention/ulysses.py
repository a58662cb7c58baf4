"""Ulysses: each rank attends to the tokens of all ranks with some heads. An all-to-all runs before and after attention.
Ranks may have different numbers of tokens and heads."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from parallel_backend.core.spans import Span, split
from parallel_backend.rank.comm.collectives import start_all_to_all
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfer_codec import Codec
from parallel_backend.rank.comm.transfers import Traffic

from .context import AttentionContext, Form, LayerCall

HEAD_GROUPS = {"cuda": 2, "cpu": 1}
"""Device -> number of head groups for each Ulysses rank. One group's all-to-all overlaps another group's attention. One on a
CPU: the cores that would compute also move the data, so nothing overlaps."""

LEAST_WORK = 1 << 14
"""Minimum of batch entries x query tokens x heads in a head group: enough for a GPU with 128 multiprocessors, tiles of
128."""


class HeadGroup(NamedTuple):
    """The heads that ranks compute together, in one exchange. If each rank has at least as many heads as groups, no rank's
    part is empty."""

    spans: tuple[Span, ...]
    """Each rank's heads."""
    heads: tuple[int, ...]
    """Each rank's number of heads."""
    are_even: bool
    """Whether the spans have equal lengths and distances. Then `_of_ranks` is one view of them all."""


class Ulysses:
    """Ulysses attention (arXiv 2309.14509). `inner`: attends with some of the heads. `in_one`: use one head group."""

    def __init__(self, inner: Form, context: AttentionContext, in_one: bool):
        self._inner, self._axis, self._in_one = inner, context.ulysses, in_one
        self._own = slice(context.of_ulysses.start, context.of_ulysses.stop)
        self._shared = context.ulysses, context.traffic, context.codec

    def attend(self, at: LayerCall, q_BQHD: torch.Tensor, k_BKHD: torch.Tensor, v_BKHD: torch.Tensor) -> torch.Tensor:
        axis, heads = self._axis, q_BQHD.shape[2]
        queries, keys = at.queries[self._own], at.keys[self._own]
        in_one = self._in_one or not at.step.message.overlap
        count = 1 if in_one else groups_of(q_BQHD, queries, heads // axis.size)
        groups = head_groups(heads, axis.size, count)
        sent, tokens = [q_BQHD, k_BKHD, v_BKHD], [queries, keys, keys]
        if at.gate_BQhD is not None:
            sent, tokens = [*sent, at.gate_BQhD], [*tokens, queries]
        # All ranks issue the transfers of a layer in this order, as their group's communicator needs: the next group comes
        # in before this one's attention, which goes out behind it.
        ready = start_sequence_to_heads(sent, tokens, groups[0], *self._shared)
        finishing = []
        for number, group in enumerate(groups, 1):
            q_BQhD, k_BKhD, v_BKhD, *gates = ready()
            if number < len(groups):
                ready = start_sequence_to_heads(sent, tokens, groups[number], *self._shared)
            at.heads, at.gate_BQhD = group.spans[axis.index], gates[0] if gates else None
            out_BQhD = self._inner.attend(at, q_BQhD, k_BKhD, v_BKhD)
            finishing.append(start_heads_to_sequence(out_BQhD, queries, group, *self._shared))
        # A rank's heads of all groups, then the next rank's.
        return torch.cat([part for of_rank in zip(*(finish() for finish in finishing), strict=True) for part in of_rank], 2)


def start_sequence_to_heads(
    tensors_BsHD: Sequence[torch.Tensor],
    tokens: Sequence[Sequence[int]],
    group: HeadGroup,
    axis: Axis,
    traffic: Traffic,
    codec: Codec | None = None,
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Start the all-to-all before attention, from tokens to heads. The returned function waits for it.

    That function returns each tensor as [B, S, h, D], with tokens in rank order. `tensors_BsHD`: queries, keys and values,
    or some of them. `tokens[i][j]`: number of tokens of tensor i on rank j.
    """
    if not group.are_even or tokens.count(tokens[0]) < len(tokens):
        return _start_apart(tensors_BsHD, tokens, group, axis, traffic, codec)
    # One all-to-all carries all tensors, since a slow link costs by the message. Tokens are the first axis of every part, so
    # that the received parts of all ranks, one behind the other, are one tensor of S tokens.
    count = len(tensors_BsHD)
    batch, length, _, size = tensors_BsHD[0].shape
    heads, values = group.heads[axis.index], count * batch * size
    send = [values * length * of_rank for of_rank in group.heads]
    flat_N = torch.stack([_of_ranks(x, group) for x in tensors_BsHD], dim=2).view(-1)
    receive = [values * heads * rank_tokens for rank_tokens in tokens[0]]
    wait = _start(codec, size, flat_N, send, receive, axis, traffic)

    def finish() -> tuple[torch.Tensor, ...]:
        return wait().view(-1, count, batch, heads, size).permute(1, 2, 0, 3, 4).unbind()

    return finish


def _start_apart(
    tensors_BsHD: Sequence[torch.Tensor],
    tokens: Sequence[Sequence[int]],
    group: HeadGroup,
    axis: Axis,
    traffic: Traffic,
    codec: Codec | None,
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Like `start_sequence_to_heads`, if ranks differ in heads or tensors in tokens: each rank gets its parts one after
    another."""
    batch, _, _, size = tensors_BsHD[0].shape
    heads = group.heads[axis.index]
    parts = [torch.cat([x[:, :, span.slice].transpose(0, 1).reshape(-1) for x in tensors_BsHD]) for span in group.spans]
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
    lengths: Sequence[int],
    group: HeadGroup,
    axis: Axis,
    traffic: Traffic,
    codec: Codec | None = None,
) -> Callable[[], Sequence[torch.Tensor]]:
    """Start the all-to-all after attention, from heads to tokens. The returned function waits for it and returns, for each
    rank, [B, s, h, D]: that rank's heads of the group. `lengths[j]`: query tokens of rank j."""
    batch, _, heads, size = part_BShD.shape
    values = batch * size
    send = [values * heads * rank_tokens for rank_tokens in lengths]
    length = lengths[axis.index]
    receive = [values * length * of_rank for of_rank in group.heads]
    wait = _start(codec, size, part_BShD.transpose(0, 1).reshape(-1), send, receive, axis, traffic)

    def finish() -> Sequence[torch.Tensor]:
        if group.are_even:
            return wait().view(axis.size, length, batch, heads, size).transpose(1, 2).unbind()
        parts = zip(wait().split(receive), group.heads, strict=True)
        return [part_n.view(length, batch, of_rank, size).transpose(0, 1) for part_n, of_rank in parts]

    return finish


def _of_ranks(x_BsHD: torch.Tensor, group: HeadGroup) -> torch.Tensor:
    """View [rank, s, B, h, D] of equal spans of heads. Made in one call: with fast devices the host's time counts."""
    (batch, tokens, heads, size), (by_entry, by_token, by_head, by_channel) = x_BsHD.shape, x_BsHD.stride()
    ranks = len(group.spans)
    return x_BsHD.as_strided(
        (ranks, tokens, batch, group.heads[0], size),
        (heads // ranks * by_head, by_token, by_entry, by_head, by_channel),
        x_BsHD.storage_offset() + group.spans[0].start * by_head,
    )


def _start(
    codec: Codec | None, size: int, x_N: torch.Tensor, send: list[int], receive: list[int], axis: Axis, traffic: Traffic
) -> Callable[[], torch.Tensor]:
    if codec is None:
        return start_all_to_all(x_N, send, receive, axis, traffic).wait
    return codec.start_all_to_all(size, x_N, send, receive, axis, traffic)


def groups_of(q_BQHD: torch.Tensor, queries: Sequence[int], heads: int) -> int:
    """Number of head groups. `heads`: of the rank with the fewest. `queries`: query tokens of each Ulysses rank."""
    groups = HEAD_GROUPS[q_BQHD.device.type]
    if heads < groups or (q_BQHD.is_cuda and len(q_BQHD) * sum(queries) * (heads // groups) < LEAST_WORK):
        return 1
    return groups


@functools.lru_cache
def head_groups(heads: int, ranks: int, groups: int) -> tuple[HeadGroup, ...]:
    """Return the `heads` of all Ulysses ranks, as `groups` groups."""
    apart, rest = divmod(heads, ranks)
    found = []
    for spans in zip(*(split(of_rank, groups) for of_rank in split(Span(0, heads), ranks)), strict=True):
        are_even = not rest and all(span == spans[0].shift(rank * apart) for rank, span in enumerate(spans))
        found.append(HeadGroup(spans, tuple(map(len, spans)), are_even))
    return tuple(found)
