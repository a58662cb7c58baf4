"""Messages of a sampling run: conditioning, micro-steps, outputs and statistics."""

from dataclasses import dataclass

import torch

from parallel_backend.core.block_changes import UNCHANGED, BlockChanges
from parallel_backend.core.spans import Span


@dataclass(frozen=True)
class PutConditioning:
    """Client -> rank: the tensors of a conditioning that this rank needs. Micro-steps refer to them by `id`."""

    id: int
    grid: tuple[int, ...]
    """The number of tokens along each of the image's axes: (frames,) rows, columns."""
    references: int
    """Number of tokens of reference images."""
    batch: int
    """The number of batch entries that this replica computes."""
    tensors: dict[str, torch.Tensor]
    """Tensors of shape [batch, ...], by the names that the model class uses."""
    along: str = "rows"
    """The outermost axis in the order of tokens, see Patching.along."""
    companion_tokens: int = 0
    """The number of tokens of the companion latent (patching.Companion), which come first in the text stream."""
    changes: BlockChanges = UNCHANGED
    """What these calls change inside the blocks."""


@dataclass(frozen=True)
class DropConditioning:
    """Client -> rank: free this conditioning and its K/V buffers."""

    id: int


@dataclass(frozen=True)
class Step:
    """Client -> rank: compute one micro-step."""

    seq: int
    """Number of the micro-step; numbers ascend in the order of sending."""
    run: int
    """The run whose K/V buffers are read and written. 0: no buffers are used, the step is exact."""
    conditioning: int
    """The conditioning, by PutConditioning.id."""
    tokens: Span
    """The image tokens of the micro-step, over all ranks of the stage: those of one band, or all."""
    with_text: bool
    """Whether text tokens are computed in the blocks too."""
    stale: bool
    """Whether displaced patches use the other patches' keys of the previous call."""
    overlap: bool
    """Whether transfers overlap with computation if possible. False: the rank waits for each transfer at once."""
    entries: Span
    """Batch entries, numbered within the replica's conditioning."""
    timestep: torch.Tensor
    """[entries] float32, in the sampler's units, see ModelCall.timestep."""
    residuals: tuple[tuple[str, int], ...]
    """For each tensor that a ControlNet adds: its name (see own_class/calls/residuals.py), and its index in `added`."""
    added: tuple[torch.Tensor, ...]
    """Tensors [entries, m, hidden] for the m image tokens of the rank; for residuals.AROUND for all tokens."""
    x: torch.Tensor
    """[entries, n + a, channels]: the rank's latent tokens and, if the text is computed, companion tokens."""

    @property
    def form(self) -> tuple[int, Span, Span, bool]:
        """A key that is equal for micro-steps with tensors of the same shapes, as long as the rank has the conditioning."""
        return self.conditioning, self.entries, self.tokens, self.with_text


@dataclass(frozen=True)
class Output:
    """Rank of the last stage -> client: the rank's shard of the model's output."""

    rank: int
    seq: int
    value: torch.Tensor
    """[entries, n + a, channels], for the same tokens as `Step.x`."""


@dataclass(frozen=True)
class OpenRun:
    """Client -> rank: a sampling run begins."""

    run: int
    extrapolate: bool
    """Whether stale keys and values are extrapolated to the present call (extrapolation.py). False: they are used
    unchanged."""


@dataclass(frozen=True)
class CloseRun:
    """Client -> rank: a run ends. Free its K/V buffers (run 0 has none) and answer with RunStats."""

    run: int


@dataclass(frozen=True)
class RunStats:
    """Rank -> client: the rank's statistics since its last RunStats."""

    rank: int
    run: int
    micro_steps: int
    compute_seconds: float
    """Seconds spent in micro-steps, without the waits in them for transfers and weights."""
    transfer_seconds: float
    """Sum of the durations of all transfers, whether the rank waited for them or not."""
    wait_seconds: float
    """Seconds for which the rank waited for transfers."""
    bytes_sent: dict[str, int]
    """Bytes of payload that the rank sent to other ranks, by mesh axis."""
    buffer_bytes: int
    """The largest size in bytes of all K/V buffers together."""
    peak_bytes: int
    """Peak device memory (CUDA), or peak resident set (CPU), in bytes."""
    graphs: int = 0
    """The number of graphs that torch.compile has created since the model was loaded."""
    attention: str = ""
    """For the report: which attention kernels a GPU used, and why."""
    arithmetic: str = ""
    """For the report: how the rank computes with quantized weights. Empty: it has none."""
    streamed_bytes: int = 0
    """Bytes of weights that were copied from host memory to the device."""
    streaming_wait_seconds: float = 0.0
    """Seconds for which the rank waited for these copies."""
    captured: int = 0
    """The number of micro-steps that were captured in a CUDA graph."""
    replayed: int = 0
    """The number of micro-steps that replayed a CUDA graph."""
    without_graphs: str = ""
    """For the report: why no micro-step is captured although the user wants it. Empty: they are captured, or not wanted."""
