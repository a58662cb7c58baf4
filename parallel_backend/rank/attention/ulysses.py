"""Ulysses' all-to-all: from a shard of the tokens with all heads to all tokens with a shard of the heads, and back.

Shape letters: B batch entries, S tokens of all ranks of the axis, s tokens of this rank, H heads, h heads of this rank,
D head size. Ranks may have different numbers of tokens and heads.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from parallel_backend.core.spans import Span, split
from parallel_backend.rank.comm.collectives import Exchange, start_all_to_all
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfer_codec import Codec, PackedExchange
from parallel_backend.rank.comm.transfers import Traffic


def start_sequence_to_heads(
    tensors_BsHD: Sequence[torch.Tensor],
    tokens: Sequence[Sequence[int]],
    spans: Sequence[Span],
    axis: Axis,
    traffic: Traffic,
    codec: Codec | None = None,
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Ulysses (arXiv 2309.14509) before attention. Starts the transfer. Call the result to wait for the same [B, S, h, D].

    `tensors_BsHD`: queries, keys and values, or some of them. `tokens[i][j]`: tokens of tensor i on rank j. `spans[j]`:
    heads that rank j gets. Tokens of the result are in rank order. One all-to-all carries them all, since slow links cost by
    the message.
    """
    tokens = [list(of_tensor) for of_tensor in tokens]
    if any(of_tensor != tokens[0] for of_tensor in tokens):
        return _start_apart(tensors_BsHD, tokens, spans, axis, traffic, codec)
    first, count = tensors_BsHD[0], len(tensors_BsHD)
    batch, own, _, size = first.shape
    here = len(spans[axis.index])
    send = [count * batch * own * len(span) * size for span in spans]
    flat = first.new_empty(sum(send))
    for span, part in zip(spans, flat.split(send), strict=True):
        part = part.view(own, count, batch, len(span), size)
        for index, x in enumerate(tensors_BsHD):
            part[:, index] = x[:, :, span.slice].transpose(0, 1)
    receive = [count * batch * length * here * size for length in tokens[0]]
    exchange = _start(codec, size)(flat, send, receive, axis, traffic)

    def finish() -> tuple[torch.Tensor, ...]:
        rows = exchange.wait().view(sum(tokens[0]), count, batch, here, size)
        return tuple(rows[:, i].transpose(0, 1) for i in range(count))

    return finish


def _start_apart(
    tensors_BsHD: Sequence[torch.Tensor],
    tokens: Sequence[Sequence[int]],
    spans: Sequence[Span],
    axis: Axis,
    traffic: Traffic,
    codec: Codec | None,
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """As `start_sequence_to_heads` where tensors have different tokens: each rank's parts of them follow each other."""
    batch, _, _, size = tensors_BsHD[0].shape
    here = len(spans[axis.index])
    parts = [torch.cat([x[:, :, span.slice].transpose(0, 1).reshape(-1) for x in tensors_BsHD]) for span in spans]
    of_ranks = list(zip(*tokens, strict=True))
    receive = [batch * sum(of_rank) * here * size for of_rank in of_ranks]
    exchange = _start(codec, size)(torch.cat(parts), [len(part) for part in parts], receive, axis, traffic)

    def finish() -> tuple[torch.Tensor, ...]:
        received = []
        for part, of_rank in zip(exchange.wait().split(receive), of_ranks, strict=True):
            rows = part.view(sum(of_rank), batch, here, size).transpose(0, 1)
            received.append(rows.split(of_rank, dim=1))
        return tuple(torch.cat(of_tensor, dim=1) for of_tensor in zip(*received, strict=True))

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
    """Ulysses after attention, the inverse. Starts the transfer. Call the result to fill the heads `spans` of `out_BsHD`."""
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
    """Heads by group and Ulysses rank. No group is empty if each rank has at least `groups` heads."""
    by_rank = [split(own, groups) for own in split(Span(0, heads), ranks)]
    return [[parts[group] for parts in by_rank] for group in range(groups)]
