"""Records of a model call: as a sampler makes it, as it is posted to the ranks, and its output while parts arrive."""

import contextlib
import functools
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import torch

from parallel_backend.core.block_changes import UNCHANGED, BlockChanges
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span, split
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.own_class.calls.patching import Latents
from parallel_backend.processes.pool import again

StartNext = Callable[[], None] | None
"""Called when a call has been posted, before its output is waited for. It may make the next call. None: there is none."""
Residuals = dict[str, torch.Tensor]
"""Name (residuals.py) -> residual of a ControlNet [B, n, hidden], for the call's n image tokens or, under residuals.AROUND,
for all tokens of the class. Several names may have the same tensor."""


def different(residuals: Residuals) -> int:
    """Return the number of different tensors among the residuals."""
    return len({id(tensor) for tensor in residuals.values()})


@dataclass(frozen=True, eq=False)
class ModelCall:
    """One evaluation of the model by a sampler, for the whole latent or for one band of it."""

    x: torch.Tensor | Latents
    """The latent [B, C, (T,) H, W]; with a companion (a video's audio) a tuple of both latents."""
    timestep: torch.Tensor
    """[B], or [B, T] with a timestep for each latent frame, or [B, N, 1] with one for each token."""
    tensors: dict[str, torch.Tensor]
    """The conditioning tensors, batch first, by the names of the class's arguments."""
    residuals: Residuals = field(default_factory=dict)
    changes: BlockChanges = UNCHANGED
    """Changes inside the blocks in this call."""
    first_replica: int = 0
    """Index, modulo the number of replicas, of the replica that gets the first batch entries."""
    may_forecast: bool = True
    """Whether the run's step cache may answer the call instead of the ranks."""


@dataclass(frozen=True)
class TokenLayout:
    """The tokens of the whole latent. All bands of a run have the same layout."""

    grid: tuple[int, ...]
    """Numbers of tokens along the image's axes: (frames,) rows, columns."""
    along: str = "rows"
    """The axis by which tokens are ordered first, see Patching.along."""
    companion_tokens: int = 0
    """Number of tokens of the companion latent, which come first in the text stream."""


@dataclass(frozen=True)
class Conditioning:
    """The inputs that several calls share. Ranks have them under `id`."""

    id: int
    layout: TokenLayout
    token_order: TokenOrder
    text_tokens: int
    """Number of tokens of the text stream, including the companion's."""
    batch: int
    tensors: dict[str, torch.Tensor]
    """The conditioning tensors, [batch, ...] each."""
    first_replica: int = 0
    """The replica that has the first entries and their K/V buffers."""
    changes: BlockChanges = UNCHANGED
    cuts: dict[tuple[Span, int], "CallCut"] = field(default_factory=dict, compare=False, repr=False)
    """(a call's `tokens`, number of the companion's tokens) -> how the call is cut."""

    def shares(self, replicas: int) -> tuple[Span, ...]:
        """Return each replica's batch entries. Larger shares begin at `first_replica`, which has all entries if they must
        stay together."""
        whole, none = Span(0, self.batch), Span(self.batch, self.batch)
        parts = (whole, *[none] * (replicas - 1)) if self.changes.together else split(whole, replicas)
        return tuple(parts[(replica - self.first_replica) % replicas] for replica in range(replicas))

    def matches(self, call: ModelCall, layout: TokenLayout, unsure: Collection[str]) -> bool:
        """Whether the call has this conditioning. Only tensors named in `unsure` are compared by value."""
        if (self.layout, self.changes) != (layout, call.changes) or self.tensors.keys() != call.tensors.keys():
            return False
        return same_values([(self.tensors[name], call.tensors[name]) for name in unsure])


@dataclass(frozen=True)
class CallCut:
    """How calls are cut into micro-steps, and micro-steps over ranks."""

    shards: tuple[tuple[Span, Span], ...]
    """For each sequence rank, its rows, see PostedCall.rows."""
    parts: tuple[tuple[tuple[Span, Span], ...], ...]
    """For each replica, the batch entries of each micro-step: their numbers in the call, and in the replica's share."""

    @functools.cached_property
    def outputs(self) -> int:
        """Number of outputs that ranks send for a call."""
        return sum(map(len, self.parts)) * len(self.shards)


def same_values(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether the tensors of each pair are equal, also in shape, dtype and device. The host waits for a device only once."""
    if any((a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) for a, b in pairs):
        return False
    on_host = [(a, b) for a, b in pairs if a.device.type == "cpu"]
    elsewhere = [(a == b).all() for a, b in pairs if a.device.type != "cpu"]
    return all(torch.equal(a, b) for a, b in on_host) and (not elsewhere or bool(torch.stack(elsewhere).all()))


@dataclass(frozen=True, eq=False)
class PostedCall:
    """A model call for the ranks: latents packed to tokens, and a conditioning that the ranks have."""

    x: torch.Tensor
    """[B, n + a, c] on the CPU: the n image tokens among `tokens`; if `with_text`, then the companion's a tokens."""
    timestep: torch.Tensor
    """Like ModelCall.timestep, float32 on the CPU."""
    conditioning: Conditioning
    tokens: Span
    """The call's span in the token order: all tokens, or those of one band."""
    with_text: bool = True  # this field and the next three: see wire.sampling.Step
    run: int = 0
    stale: bool = False
    overlap: bool = True
    residuals: Residuals = field(default_factory=dict)
    future: Future = field(default_factory=Future)
    """Its result is the output's tokens [B, n + a, c] on the CPU."""

    @property
    def companion_tokens(self) -> int:
        """Number of the companion's tokens in this call."""
        return self.conditioning.layout.companion_tokens if self.with_text else 0

    def rows(self, cut: SequenceCut) -> list[tuple[Span, Span]]:
        """For each sequence rank, two spans of its rows of `x`: image tokens, and the companion's tokens."""
        count = len(self.conditioning.token_order.images(self.tokens)) + self.companion_tokens
        assert self.x.shape[:2] == (self.conditioning.batch, count)
        return cut.rows(self.conditioning.token_order, self.tokens, self.companion_tokens)


def has_token_times(timestep: torch.Tensor) -> bool:
    """Whether tokens have different timesteps: `timestep` is [B, T] or has more axes."""
    return timestep.ndim > 1 and timestep.shape[1] > 1


def fail(future: Future, error: BaseException) -> None:
    """End a call with `error`, unless it has ended already, such as by another part that was not finite."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(again(error))


class PartialOutput:
    """A call's output while its parts arrive, each from one rank and for one micro-step."""

    def __init__(self, call: PostedCall, cut: CallCut):
        self.call, self.shards = call, cut.shards
        self._missing = cut.outputs
        self._parts: list[tuple[Span, tuple[Span, ...], torch.Tensor]] = []

    def put(self, entries: Span, rows: tuple[Span, ...], part: torch.Tensor) -> bool:
        """Add a part, whose consecutive pieces are the spans `rows` of the output. Returns whether it was the last part."""
        self._parts.append((entries, rows, part))
        self._missing -= 1
        return self._missing == 0

    def tokens(self) -> torch.Tensor:
        """Return the output [B, n + a, c]. To be called once all parts have arrived."""
        first = self._parts[0][2]
        tokens = first.new_empty(*self.call.x.shape[:2], first.shape[-1])
        for entries, rows, part in self._parts:
            for span, values in zip(rows, part.split([len(span) for span in rows], dim=1), strict=True):
                tokens[entries.slice, span.slice] = values
        return tokens


@dataclass(frozen=True)
class PostedStep:
    """One replica's micro-step. `entries`: numbers in the call. `local`: numbers in the replica's conditioning."""

    seq: int
    output: PartialOutput
    """The output of its call."""
    entries: Span
    local: Span
    awaited: set[int]
    """Ranks whose output has not come."""
