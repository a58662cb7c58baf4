"""A model call: as a sampler makes it, as it is posted to the ranks, and its output while the parts arrive."""

import contextlib
from collections.abc import Collection
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import torch

from parallel_backend.core.block_changes import UNCHANGED, BlockChanges
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span, split
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.families.base.patching import Latents
from parallel_backend.processes.pool import again

Residuals = dict[str, torch.Tensor]
"""A ControlNet's additions: block "<list>.<index>" -> [B, n, hidden]. Several blocks may have the same tensor."""


@dataclass(frozen=True, eq=False)
class ModelCall:
    """One evaluation of the model, as a sampler makes it: of the whole latent, or of one band of it."""

    x: torch.Tensor | Latents
    """The latent [B, C, (T,) H, W]; with a companion (a video's sound) both latents."""
    timestep: torch.Tensor
    """[B], or [B, T] with a time for each latent frame, or [B, N, 1] with one for each token."""
    tensors: dict[str, torch.Tensor]
    """The conditioning tensors, batch first, see families.base.family.Inputs."""
    residuals: Residuals = field(default_factory=dict)
    changes: BlockChanges = UNCHANGED
    """What the call changes inside the blocks."""
    first_replica: int = 0
    """The replica that gets the first batch entries, modulo the number of replicas."""
    may_forecast: bool = True
    """The run's step cache may answer the call in place of the ranks."""


@dataclass(frozen=True)
class TokenLayout:
    """Where the tokens of the whole latent are. All bands of a run have the same layout."""

    grid: tuple[int, ...]
    """Tokens along the picture's axes: (frames,) rows, columns."""
    along: str = "rows"
    """The axis by which tokens are ordered first, see Patching.along."""
    companion_tokens: int = 0
    """Tokens of the companion latent, which come first in the text stream."""


@dataclass(frozen=True)
class Conditioning:
    """What a set of calls shares, as the ranks know it by `id`."""

    id: int
    layout: TokenLayout
    token_order: TokenOrder
    text_tokens: int
    """Tokens of the text stream, the companion's among them."""
    batch: int
    tensors: dict[str, torch.Tensor]
    """[batch, ...] each."""
    first_replica: int = 0
    """The replica that has the first of the entries, and their K/V buffers."""
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

    def matches(self, call: ModelCall, layout: TokenLayout, unsure: Collection[str]) -> bool:
        """Whether the call is one for this conditioning. Only the tensors named in `unsure` are compared by their values."""
        if (self.layout, self.changes) != (layout, call.changes) or self.tensors.keys() != call.tensors.keys():
            return False
        return same_values([(self.tensors[name], call.tensors[name]) for name in unsure])


def same_values(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether the tensors of each pair are equal, in shape, dtype and device too. A device is waited for once, if at all."""
    if any((a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) for a, b in pairs):
        return False
    on_host = [(a, b) for a, b in pairs if a.device.type == "cpu"]
    elsewhere = [(a == b).all() for a, b in pairs if a.device.type != "cpu"]
    return all(torch.equal(a, b) for a, b in on_host) and (not elsewhere or bool(torch.stack(elsewhere).all()))


@dataclass(frozen=True, eq=False)
class PostedCall:
    """A model call as the ranks get it: latents packed to tokens, the conditioning by its number."""

    x: torch.Tensor
    """[B, n + a, c] on the CPU: the picture's n tokens among `tokens`, and with the text the companion's a tokens."""
    timestep: torch.Tensor
    """As ModelCall.timestep, float32 on the CPU."""
    conditioning: Conditioning
    tokens: Span
    """Tokens of the token order: all, or those of one band."""
    with_text: bool = True
    """The text stream runs along."""
    run: int = 0
    """The run whose K/V buffers are read and written. 0: none."""
    stale: bool = False
    """See wire.sampling.Step."""
    overlap: bool = True
    """See wire.sampling.Step."""
    residuals: Residuals = field(default_factory=dict)
    future: Future = field(default_factory=Future)
    """Gives the output's tokens [B, n + a, c] on the CPU."""

    @property
    def companion_tokens(self) -> int:
        """Tokens of the companion that this call has."""
        return self.conditioning.layout.companion_tokens if self.with_text else 0

    def rows(self, cut: SequenceCut) -> list[tuple[Span, Span]]:
        """By sequence rank, its rows of `x`: the picture's, and the companion's."""
        text = self.conditioning.text_tokens if self.with_text else 0
        return cut.rows(self.conditioning.token_order, self.tokens, text, self.companion_tokens)


def has_token_times(timestep: torch.Tensor) -> bool:
    """Tokens have times of their own: timesteps [B, T], or more axes."""
    return timestep.ndim > 1 and timestep.shape[1] > 1


def fail(future: Future, error: BaseException) -> None:
    """End a call with `error`, unless it has ended already: a rank may fail while others are asked about an output."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(again(error))


class PartialOutput:
    """A call's output while its parts arrive, each from one rank and of one micro-step.

    `first_seq`: number of the call's first micro-step. `parts`: how many parts come.
    """

    def __init__(self, call: PostedCall, first_seq: int, parts: int):
        self.call, self.first_seq = call, first_seq
        self.nonfinite = False  # a part was not finite: the call is going to fail, with what the ranks know of it
        self._missing = parts
        self._parts: list[tuple[Span, tuple[Span, ...], torch.Tensor]] = []

    def put(self, entries: Span, rows: tuple[Span, ...], part: torch.Tensor) -> bool:
        """`rows`: spans of the output that the part has, one behind the other. True when this was the last part."""
        self._parts.append((entries, rows, part))
        self._missing -= 1
        return self._missing == 0

    def tokens(self) -> torch.Tensor:
        """[B, n + a, c], once all parts have come."""
        first = self._parts[0][2]
        tokens = first.new_empty(*self.call.x.shape[:2], first.shape[-1])
        for entries, rows, part in self._parts:
            for span, values in zip(rows, part.split([len(span) for span in rows], dim=1), strict=True):
                tokens[entries.slice, span.slice] = values
        return tokens


@dataclass(frozen=True)
class PostedStep:
    """One replica's micro-step. `entries` counts within the call, `local` within the replica's conditioning."""

    seq: int
    assembly: PartialOutput
    entries: Span
    local: Span
