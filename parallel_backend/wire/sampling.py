"""Messages of a sampling run: conditioning, micro-steps, outputs and statistics."""

from dataclasses import dataclass

import torch

from parallel_backend.core.block_changes import UNCHANGED, BlockChanges
from parallel_backend.core.spans import Span


@dataclass(frozen=True)
class PutConditioning:
    """Client -> rank: the tensors of a conditioning that this rank needs. Model calls refer to them by `id`."""

    id: int
    grid: tuple[int, ...]
    """Numbers of tokens along the image's axes: (frames,) rows, columns."""
    references: int
    """Number of tokens of reference images."""
    batch: int
    """Number of batch entries of this replica."""
    tensors: dict[str, torch.Tensor]
    """[batch, ...] each, by the class's names."""
    along: str = "rows"
    """The axis by which tokens are ordered first, see Patching.along."""
    companion_tokens: int = 0
    """Number of tokens of the companion latent (patching.Companion), which come first in the text stream."""
    changes: BlockChanges = UNCHANGED
    """Changes of these calls inside the blocks."""


@dataclass(frozen=True)
class DropConditioning:
    """Client -> rank: free this conditioning and its K/V buffers."""

    id: int


@dataclass(frozen=True)
class Step:
    """Client -> rank: compute one micro-step."""

    seq: int
    """Number of the micro-step, ascending in the order of issue."""
    run: int
    """Run whose K/V buffers are read and written. 0: none, the step is exact."""
    conditioning: int
    """PutConditioning.id."""
    tokens: Span
    """The micro-step's image tokens, over all ranks of the stage: a band's, or all."""
    with_text: bool
    """Text tokens run through the blocks too."""
    stale: bool
    """Displaced patches use the other patches' keys of the call before."""
    overlap: bool
    """Transfers overlap with compute where possible. False: each transfer is waited for at once."""
    entries: Span
    """Batch entries, numbered within the replica's conditioning."""
    timestep: torch.Tensor
    """[entries] float32, in the sampler's units, see ModelCall.timestep."""
    residuals: tuple[tuple[str, int], ...]
    """(name, see own_class/calls/residuals.py; index in `added` of the tensor that a ControlNet adds)."""
    added: tuple[torch.Tensor, ...]
    """[entries, m, hidden] each, for the rank's m image tokens, or of residuals.AROUND for all tokens."""
    x: torch.Tensor
    """[entries, n + a, channels]: the rank's latent tokens and, if the text runs, companion tokens."""

    @property
    def form(self) -> tuple[int, Span, Span, bool]:
        """Alike for micro-steps whose tensors have the same shapes, as long as the rank has the conditioning."""
        return self.conditioning, self.entries, self.tokens, self.with_text


@dataclass(frozen=True)
class Output:
    """Rank of the last stage -> client: the rank's shard of the model's output."""

    rank: int
    seq: int
    value: torch.Tensor
    """[entries, n + a, channels], as `Step.x`."""


@dataclass(frozen=True)
class OpenRun:
    """Client -> rank: a run begins."""

    run: int
    extrapolate: bool
    """Stale keys and values are extrapolated to the present call (extrapolation.py). False: used unchanged."""


@dataclass(frozen=True)
class CloseRun:
    """Client -> rank: a run ends. Free its K/V buffers (run 0 has none) and answer RunStats."""

    run: int


@dataclass(frozen=True)
class RunStats:
    """Rank -> client: statistics of the rank since its last RunStats."""

    rank: int
    run: int
    micro_steps: int
    compute_seconds: float
    """Time in micro-steps, without `wait_seconds` and `streaming_wait_seconds`."""
    transfer_seconds: float
    """Sum of the transfers' times, whether the rank waited for them or not."""
    wait_seconds: float
    """Time in which the rank waited for transfers."""
    bytes_sent: dict[str, int]
    """Payload that the rank sent to others, by mesh axis."""
    buffer_bytes: int
    """Largest size of all K/V buffers together."""
    peak_bytes: int
    """Peak device memory (CUDA), or peak resident set (CPU)."""
    graphs: int = 0
    """Number of graphs that torch.compile has made since the model was loaded."""
    attention: str = ""
    """For the report: the attention kernels that a GPU used, and why."""
    arithmetic: str = ""
    """For the report: how the rank computes with quantised weights. Empty: it has none."""
    streamed_bytes: int = 0
    """Bytes of weights that were copied from host memory to the device."""
    streaming_wait_seconds: float = 0.0
    """Time in which the rank waited for these copies."""
    captured: int = 0
    """Number of micro-steps that were captured in a CUDA graph."""
    replayed: int = 0
    """Number of micro-steps that replayed a CUDA graph."""
    without_graphs: str = ""
    """For the report: why no micro-step is captured although the user wants it. Empty: they are, or are not to be."""
