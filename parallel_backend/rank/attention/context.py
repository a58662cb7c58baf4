"""What attention on a rank reads: AttentionContext of the loaded model, AttentionStep of the micro-step that runs, and
LayerCall, a call on its way through the forms of attention (rank_tokens.py)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnAttention
from parallel_backend.core.spans import Span
from parallel_backend.own_class.cuts.attention_calls import AttentionCall
from parallel_backend.rank.comm.change_codec import ChangeCodec, changes_for
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfer_codec import Codec, codec_for
from parallel_backend.rank.comm.transfers import Traffic

from .kernel_choice import RankKernel
from .kv_buffer import KVBuffer
from .sparse import SparseStep
from .words import WordKeys

WHOLE = OwnAttention((), (), 0, 0)
"""A call that is over all tokens on every rank."""


@dataclass(frozen=True)
class AttentionContext:
    """Facts of a loaded stage. Nothing here changes from one micro-step to the next."""

    patch: Axis
    """The patch axis. It has a single rank if patches are naive, because such a patch sees no other patch."""
    ring: Axis
    ulysses: Axis
    tensor: Axis
    naive: bool
    traffic: Traffic
    codec: Codec | None
    """Packs what Ulysses sends."""
    changes: ChangeCodec | None
    """Packs what displaced patches send."""

    @staticmethod
    def of(degrees: Degrees, axes: dict[str, Axis], traffic: Traffic, transfer_dtype: str) -> "AttentionContext":
        patch = replace(axes["patch"], index=0, size=1) if degrees.naive else axes["patch"]
        codecs = codec_for(transfer_dtype), changes_for(transfer_dtype)
        return AttentionContext(patch, axes["ring"], axes["ulysses"], axes["tensor"], degrees.naive, traffic, *codecs)

    @functools.cached_property
    def of_patches(self) -> tuple[range, ...]:
        """By index on the patch axis: its sequence ranks, which count up by ulysses, ring, patch."""
        size = self.ring.size * self.ulysses.size
        return tuple(range(index * size, (index + 1) * size) for index in range(self.patch.size))

    @functools.cached_property
    def of_ring(self) -> tuple[range, ...]:
        """By index on the ring axis: its sequence ranks in this rank's patch."""
        first, size = self.of_patches[self.patch.index].start, self.ulysses.size
        return tuple(range(first + index * size, first + (index + 1) * size) for index in range(self.ring.size))

    @functools.cached_property
    def of_ulysses(self) -> range:
        """Sequence ranks of this rank's Ulysses axis."""
        return self.of_ring[self.ring.index]


@dataclass
class AttentionStep:
    """Facts about the present micro-step for attention. The same on all ranks of a stage."""

    kernel: RankKernel
    entries: Span
    """Batch entries that the micro-step computes."""
    buffer: KVBuffer | None
    """The run's K/V buffer. None outside of runs."""
    stale: bool = False
    """Displaced patches: keys of other bands are those of the call before."""
    overlap: bool = True
    """Transfers run during compute where possible."""
    residuals: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Residuals of a control, [entries, n, hidden] each, by the control's names."""
    sparse: SparseStep | None = None
    """Block-sparse attention. None: in full."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """See RankConditioning.kept."""
    known: dict[Any, Any] = field(default_factory=dict)
    """See TokenCut.known."""
    words: WordKeys | None = None
    """Keys of words outside of runs, if they are kept."""
    words_have_run: bool = False
    """In an earlier micro-step."""
    gate: torch.Tensor | None = None
    """VSA's gate [B, s, H x D] of the layer that runs, made of this rank's tokens."""

    @property
    def in_bands(self) -> bool:
        """Keys are in the order of the K/V buffer."""
        return self.buffer is not None or self.words is not None

    def take_gate(self, q_BQHD: torch.Tensor) -> torch.Tensor | None:
        """`gate`, as these queries have their heads, for their layer alone. None: it has none."""
        gate, self.gate = self.gate, None
        return None if gate is None else gate.reshape(q_BQHD.shape)


class TokenNumbers(Protocol):
    """Which tokens the rows of a call are, among all that the class has."""

    def numbers(self, at: "LayerCall", queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[Q], [K] int64 in host memory: numbers of so many queries and keys, in the order in which they are attended to.
        The same tensors in all calls that are alike."""

    def places(self, streams: tuple[int, ...]) -> Callable[[], torch.Tensor] | None:
        """See SparseStep.of_class."""


@dataclass(slots=True)
class LayerCall:
    """A call of attention. Forms change `heads`, `mask_bK` and `gate_BQhD` as they change the tensors."""

    call: AttentionCall
    step: AttentionStep
    kernel: "Form"
    """Computes attention of the queries to the keys, once this rank has both."""
    rows: TokenNumbers
    gate_BQhD: torch.Tensor | None
    heads: Span
    """The tensors' heads, among the call's heads."""
    mask_bK: torch.Tensor | None = None
    """bool, keys that are seen. None: all."""
    spec: OwnAttention = WHOLE
    layer: int = 0
    """Number of the call among all of the class."""
    queries: Sequence[int] = ()
    """Query tokens of each sequence rank."""
    keys: Sequence[int] = ()
    """Key tokens of each sequence rank."""


class Form(Protocol):
    """A form of attention. One that changes the tensors alone hands them to another."""

    def attend(self, at: LayerCall, q_BQhD: torch.Tensor, k_BKhD: torch.Tensor, v_BKhD: torch.Tensor) -> torch.Tensor:
        """[B, Q, h, D] of these queries, over the keys of all ranks. A rank may have no token, and no head."""
