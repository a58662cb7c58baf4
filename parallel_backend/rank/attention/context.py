"""The data that attention on a rank reads: AttentionContext of the loaded model, AttentionStep of the present micro-step,
and LayerCall, one call as it passes through the forms of attention (rank_tokens.py)."""

import functools
from collections.abc import Callable, Mapping
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
from parallel_backend.wire.sampling import Step

from .kernel_choice import RankKernel
from .kv_buffer import KVBuffer
from .sparse import SparseStep
from .words import WordKeys

WHOLE = OwnAttention((), (), 0, 0)
"""The OwnAttention of a call in which every rank has all tokens."""


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
    """Packs what Ulysses sends. None: nothing is packed."""
    changes: ChangeCodec | None
    """Packs what displaced patches send. None: nothing is packed."""

    @staticmethod
    def of(degrees: Degrees, axes: dict[str, Axis], traffic: Traffic, transfer_dtype: str) -> "AttentionContext":
        patch = replace(axes["patch"], index=0, size=1) if degrees.naive else axes["patch"]
        codecs = codec_for(transfer_dtype), changes_for(transfer_dtype)
        return AttentionContext(patch, axes["ring"], axes["ulysses"], axes["tensor"], degrees.naive, traffic, *codecs)

    @functools.cached_property
    def of_patches(self) -> tuple[range, ...]:
        """For each index on the patch axis, its sequence ranks. They are numbered by ulysses, then ring, then patch."""
        size = self.ring.size * self.ulysses.size
        return tuple(range(index * size, (index + 1) * size) for index in range(self.patch.size))

    @functools.cached_property
    def of_ring(self) -> tuple[range, ...]:
        """For each index on the ring axis, its sequence ranks in this rank's patch."""
        first, size = self.of_patches[self.patch.index].start, self.ulysses.size
        return tuple(range(first + index * size, first + (index + 1) * size) for index in range(self.ring.size))

    @functools.cached_property
    def of_ulysses(self) -> range:
        """The sequence ranks of this rank's Ulysses axis."""
        return self.of_ring[self.ring.index]


@dataclass
class AttentionStep:
    """Facts about the present micro-step for attention. The same on all ranks of a stage."""

    message: Step
    """The micro-step."""
    kernel: RankKernel
    buffer: KVBuffer | None
    """The run's K/V buffer. None outside of runs."""
    residuals: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Residuals of a ControlNet, [entries, n, hidden] each, by the names that residuals.by_name gives them."""
    sparse: SparseStep | None = None
    """Block-sparse attention. None: attention is dense."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """See RankConditioning.kept."""
    known: dict[Any, Any] = field(default_factory=dict)
    """See TokenCut.known."""
    words: WordKeys | None = None
    """Stored keys of the text, outside of runs. None: they are not stored."""
    gate: torch.Tensor | None = None
    """VSA's gate [B, s, H x D] of the layer that runs, computed from this rank's tokens."""

    @property
    def in_bands(self) -> bool:
        """Whether keys are in the order of the K/V buffer."""
        return self.buffer is not None or self.words is not None

    def take_gate(self, q_BQHD: torch.Tensor) -> torch.Tensor | None:
        """`gate` in the shape of these queries; it is cleared, since it is for one layer only. None: there is no gate."""
        gate, self.gate = self.gate, None
        return None if gate is None else gate.reshape(q_BQHD.shape)


class TokenNumbers(Protocol):
    """The numbers of a call's rows among all tokens that the class has."""

    def numbers(self, at: "LayerCall", queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of the queries [Q] and keys [K], int64 in host memory, in the order in which the kernel gets
        them. Calls with the same tokens get the same tensors."""

    def places(self, streams: tuple[int, ...]) -> Callable[[], torch.Tensor] | None:
        """Return the argument `place_of_rows` of SparseStep.of_class."""


@dataclass(slots=True)
class LayerCall:
    """One attention call. Forms change `heads`, `mask_bK` and `gate_BQhD` when they change the tensors."""

    call: AttentionCall
    step: AttentionStep
    kernel: "Form"
    """Computes attention of the queries to the keys, once this rank has both."""
    rows: TokenNumbers
    gate_BQhD: torch.Tensor | None
    heads: Span
    """The heads that the tensors have, among the call's heads."""
    mask_bK: torch.Tensor | None = None
    """bool, True for keys that are seen. None: all are."""
    spec: OwnAttention = WHOLE
    layer: int = 0
    """Number of the call among all attention calls of the class."""
    queries: tuple[int, ...] = ()
    """Number of query tokens, by sequence rank."""
    keys: tuple[int, ...] = ()
    """Number of key tokens, by sequence rank."""


class Form(Protocol):
    """A step on the way of an attention call. Most forms change the tensors and call another form."""

    def attend(self, at: LayerCall, q_BQhD: torch.Tensor, k_BKhD: torch.Tensor, v_BKhD: torch.Tensor) -> torch.Tensor:
        """Return attention [B, Q, h, D] of these queries to the keys of all ranks. A rank may have no tokens or no heads."""
