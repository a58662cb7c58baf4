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
    q_BsHD: torch.Tensor,
    k_BsHD: torch.Tensor,
    v_BsHD: torch.Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    spans: Sequence[Span],
    axis: Axis,
    traffic: Traffic,
    codec: Codec | None = None,
) -> Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Ulysses (arXiv 2309.14509) before attention. Starts the transfer. Call the result to wait for q, k, v [B, S, h, D].

    `queries[j]`, `keys[j]`: query tokens of rank j, and tokens that have its keys and values. `spans[j]`: heads that rank j
    gets. Tokens of the result are in rank order. One all-to-all carries q, k and v, since slow links cost by the message.
    """
    if list(queries) != list(keys):
        return _start_apart(q_BsHD, k_BsHD, v_BsHD, queries, keys, spans, axis, traffic, codec)
    batch, own, _, size = q_BsHD.shape
    here = len(spans[axis.index])
    send = [3 * batch * own * len(span) * size for span in spans]
    flat = q_BsHD.new_empty(sum(send))
    for span, part in zip(spans, flat.split(send), strict=True):
        part = part.view(own, 3, batch, len(span), size)
        for index, x in enumerate((q_BsHD, k_BsHD, v_BsHD)):
            part[:, index] = x[:, :, span.slice].transpose(0, 1)
    receive = [3 * batch * length * here * size for length in queries]
    exchange = _start(codec, size)(flat, send, receive, axis, traffic)

    def finish() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = exchange.wait().view(sum(queries), 3, batch, here, size)
        return tuple(rows[:, i].transpose(0, 1) for i in range(3))

    return finish


def _start_apart(
    q_BsHD: torch.Tensor,
    k_BsHD: torch.Tensor,
    v_BsHD: torch.Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    spans: Sequence[Span],
    axis: Axis,
    traffic: Traffic,
    codec: Codec | None,
) -> Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """As `start_sequence_to_heads` where queries are of other tokens than keys: each rank's q, k and v follow each other."""
    batch, size, here = len(q_BsHD), q_BsHD.shape[-1], len(spans[axis.index])
    parts = [
        torch.cat([x[:, :, span.slice].transpose(0, 1).reshape(-1) for x in (q_BsHD, k_BsHD, v_BsHD)]) for span in spans
    ]
    receive = [batch * (tokens + 2 * looked_at) * here * size for tokens, looked_at in zip(queries, keys, strict=True)]
    exchange = _start(codec, size)(torch.cat(parts), [len(part) for part in parts], receive, axis, traffic)

    def finish() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        received = []
        for part, tokens, looked_at in zip(exchange.wait().split(receive), queries, keys, strict=True):
            rows = part.view(tokens + 2 * looked_at, batch, here, size).transpose(0, 1)
            received.append(rows.split((tokens, looked_at, looked_at), dim=1))
        return tuple(torch.cat(of_ranks, dim=1) for of_ranks in zip(*received, strict=True))

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
