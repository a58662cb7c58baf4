"""State that parallel attention reads: AttentionContext of the loaded model, AttentionStep of the micro-step that runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.rank.comm.change_codec import changes_for
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfer_codec import codec_for
from parallel_backend.rank.comm.transfers import Traffic

from .kernel_choice import RankKernel
from .kv_buffer import KVBuffer
from .sparse import SparseCalls, SparseStep
from .words import WordKeys


@dataclass
class AttentionStep:
    """What attention reads of the present micro-step. Alike on all ranks of a stage."""

    entries: Span
    """Batch entries that the micro-step computes."""
    buffer: KVBuffer | None
    """The run's K/V buffer. None outside of runs."""
    stale: bool = False
    """Displaced patches: keys of other bands are those of the call before."""
    overlap: bool = True
    """Transfers run during compute where possible."""
    residuals: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What a control adds, [entries, n, hidden] each, by the control's names."""
    sparse: SparseStep | None = None
    """Block-sparse attention. None: in full."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """See RankConditioning.kept."""
    words: WordKeys | None = None
    """Keys of words outside of runs, if they are kept."""
    words_have_run: bool = False
    """In an earlier micro-step."""


class AttentionContext:
    """State shared by all layers of a stage: axes, kernel, counters, and the micro-step that runs."""

    def __init__(
        self,
        degrees: Degrees,
        axes: dict[str, Axis],
        kernel: RankKernel,
        traffic: Traffic,
        transfer_dtype: str,
    ):
        """`transfer_dtype`: how Ulysses and displaced patches pack what they send."""
        self.patch, self.ring, self.ulysses, self.tensor = axes["patch"], axes["ring"], axes["ulysses"], axes["tensor"]
        self.naive = degrees.naive
        self.kernel, self.traffic = kernel, traffic
        self.codec, self.changes = codec_for(transfer_dtype), changes_for(transfer_dtype)
        self.step: AttentionStep | None = None
        self.gate: torch.Tensor | None = None
        """VSA's gate [B, s, H x D] of the layer that runs, made of this rank's tokens."""
        self.sparse_calls = SparseCalls()

    def take_gate(self, q_BQHD: torch.Tensor) -> torch.Tensor | None:
        """`gate`, as these queries have their heads, for their layer alone. None: it has none."""
        gate, self.gate = self.gate, None
        return None if gate is None else gate.reshape(q_BQHD.shape)

    def ulysses_ranks(self, patch: int, ring: int) -> range:
        """Sequence ranks at these indices of the patch and ring axes. Sequence ranks count up by ulysses, ring, patch."""
        first = (patch * self.ring.size + ring) * self.ulysses.size
        return range(first, first + self.ulysses.size)

    def patch_ranks(self, patch: int) -> range:
        """Sequence ranks at this index of the patch axis."""
        size = self.ring.size * self.ulysses.size
        return range(patch * size, (patch + 1) * size)
