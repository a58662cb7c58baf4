"""A model call on its way: what it is made of at the client, cut into micro-steps and put together again."""

import contextlib
from collections.abc import Collection
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import torch

from parallel_backend.core.block_changes import UNCHANGED, BlockChanges
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span, split
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.processes.pool import again


@dataclass(frozen=True)
class Conditioning:
    """What a set of calls shares, as the ranks know it by `id`: tensors, whose first axis is the batch, and `changes`.

    `first_replica`: the replica that has the first of their entries; its K/V buffers are there. `companion_tokens`: how
    many of the text tokens, the first ones, are the companion latent's.
    """

    id: int
    grid: tuple[int, ...]
    token_order: TokenOrder
    text_tokens: int
    batch: int
    tensors: dict[str, torch.Tensor]
    first_replica: int = 0
    companion_tokens: int = 0
    changes: BlockChanges = UNCHANGED

    def shares(self, replicas: int) -> tuple[Span, ...]:
        """Its entries by replica: consecutive ones, the larger shares from `first_replica` on.

        All are `first_replica`'s where they must stay together.
        """
        whole = Span(0, self.batch)
        parts = (
            (whole, *[Span(self.batch, self.batch)] * (replicas - 1)) if self.changes.together else split(whole, replicas)
        )
        return tuple(parts[(replica - self.first_replica) % replicas] for replica in range(replicas))

    def matches(
        self,
        grid: tuple[int, ...],
        tensors: dict[str, torch.Tensor],
        unsure: Collection[str] | None = None,
        along: str = "rows",
        companion_tokens: int = 0,
        changes: BlockChanges = UNCHANGED,
    ) -> bool:
        """Whether a call with these tensors is one for this conditioning. Only those named in `unsure` are compared."""
        own = self.grid, self.token_order.along, self.companion_tokens, self.changes
        if own != (grid, along, companion_tokens, changes) or self.tensors.keys() != tensors.keys():
            return False
        return same_values([(self.tensors[name], tensors[name]) for name in (tensors if unsure is None else unsure)])


def same_values(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether the tensors of each pair are equal, in shape, dtype and device too. A device is waited for once, if at all."""
    if any((a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) for a, b in pairs):
        return False
    on_host = [(a, b) for a, b in pairs if a.device.type == "cpu"]
    elsewhere = [(a == b).all() for a, b in pairs if a.device.type != "cpu"]
    return all(torch.equal(a, b) for a, b in on_host) and (not elsewhere or bool(torch.stack(elsewhere).all()))


Residuals = dict[str, torch.Tensor]
"""A ControlNet's additions: block "<list>.<index>" -> [B, n, hidden]. Several blocks may have the same tensor."""


@dataclass(frozen=True)
class Call:
    """One evaluation of the transformer for tokens `tokens` of the token order.

    `x` [B, n + a, c]: the picture's tokens among them, and with the text those of the companion latent. `run` is 0 for a
    call without buffers.
    `timestep`, `stale`, `overlap`: see sampling.Step. `residuals`: block "<list>.<index>" -> [B, n, hidden] added behind it.
    """

    x: torch.Tensor
    timestep: torch.Tensor
    conditioning: Conditioning
    tokens: Span
    with_text: bool
    run: int
    stale: bool
    overlap: bool
    residuals: Residuals
    future: Future = field(default_factory=Future)

    @property
    def companion_tokens(self) -> int:
        """Tokens of the companion latent."""
        return self.conditioning.companion_tokens if self.with_text else 0

    def rows(self, cut: SequenceCut) -> list[tuple[Span, Span]]:
        """By sequence rank, its rows of `x`: the picture's, and those of the companion latent."""
        text = self.conditioning.text_tokens if self.with_text else 0
        return cut.rows(self.conditioning.token_order, self.tokens, text, self.companion_tokens)


def fail(future: Future, error: Exception) -> None:
    """End a call with `error`, unless it has ended already: a rank may fail while others are asked about an output."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(again(error))


class PartialOutput:
    """The output of a call while its parts arrive. Parts are (entries, tokens) of [B, n + a, c], by micro-step and rank."""

    def __init__(self, call: Call):
        self.call, self.missing, self.value = call, 0, None
        self.first_seq = 0  # number of the call's first micro-step
        self.nonfinite = False  # a part was not finite: the call is going to fail, with what the ranks know of it

    def put(self, entries: Span, rows: tuple[Span, ...], part: torch.Tensor) -> bool:
        """`rows`: spans of the output that the part has, one behind the other. True when this was the last part."""
        if self.value is None:
            self.value = part.new_empty(*self.call.x.shape[:2], part.shape[-1])
        start = 0
        for span in rows:
            self.value[entries.slice, span.slice] = part[:, start : start + len(span)]
            start += len(span)
        self.missing -= 1
        return self.missing == 0


@dataclass(frozen=True)
class PostedStep:
    """One replica's micro-step. `entries` counts within the call, `local` within the replica's conditioning."""

    seq: int
    assembly: PartialOutput
    entries: Span
    local: Span
