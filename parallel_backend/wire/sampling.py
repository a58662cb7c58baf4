"""Messages of a sampling run: conditioning, micro-steps, outputs and statistics."""

from dataclasses import dataclass, field

import torch

from parallel_backend.core.block_changes import UNCHANGED, BlockChanges
from parallel_backend.core.spans import Span


@dataclass(frozen=True)
class PutConditioning:
    """Client -> rank: the tensors that a set of model calls shares, as far as this rank needs them."""

    id: int
    grid: tuple[int, ...]
    """Tokens along each image axis: (rows, columns) or (frames, rows, columns)."""
    references: int
    """Tokens of reference pictures."""
    text_tokens: int
    """Tokens of the whole text stream, over all ranks."""
    batch: int
    """Batch entries of this replica."""
    tensors: dict[str, torch.Tensor]
    """By the family's names. First axis: `batch`. Token tensors are the rank's own shard."""
    along: str = "rows"
    """Patching.along of the calls: which axis tokens are ordered by first."""
    companion_tokens: int = 0
    """Tokens of the whole text stream, the first of it, that are the companion latent's (patching.Companion)."""
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
    """Number of the micro-step. Later ones have larger numbers."""
    run: int
    """Run whose K/V buffers are used. 0: none, the step is exact and leaves nothing behind."""
    conditioning: int
    """PutConditioning.id."""
    tokens: Span
    """The micro-step's image tokens, over all ranks of the stage: a band's, or all."""
    with_text: bool
    """Text tokens run through the blocks too."""
    stale: bool
    """Displaced patches use each other's keys of the call before."""
    overlap: bool
    """Transfers run beside compute where possible, instead of being waited for at once."""
    entries: Span
    """Batch entries, numbered within the replica's conditioning."""
    timestep: torch.Tensor
    """[entries] float32 as the sampler gave it, see families.base.StepInputs."""
    residuals: dict[str, int]
    """Block "<list>.<index>" of the stage -> index in `added` of what a ControlNet adds behind it."""
    added: tuple[torch.Tensor, ...]
    """Each [entries, m, hidden], for the picture's tokens among the rank's."""
    x: torch.Tensor | None
    """The rank's shard [entries, n + a, channels] of the latent, and of the one beside it if the text runs. None on later
    stages."""


@dataclass(frozen=True)
class Output:
    """Rank of the last stage -> client: the rank's shard of the prediction, [entries, n + a, channels], as `Step.x`."""

    rank: int
    seq: int
    value: torch.Tensor


@dataclass(frozen=True)
class OpenRun:
    """Client -> rank: a run begins."""

    run: int
    extrapolate: bool
    """Stale keys and values are extrapolated to the present call (extrapolation.py), instead of used as they are."""


@dataclass(frozen=True)
class CloseRun:
    """Client -> rank: a run is over. Drop its K/V buffers and answer RunStats. Run 0 has no buffers: only answer."""

    run: int


@dataclass(frozen=True)
class BlockStats:
    """One block's costs in a rehearsal since the last report."""

    seconds: float
    """Of all its calls, with their transfers."""
    bytes_sent: dict[str, int]
    """By mesh axis."""


@dataclass(frozen=True)
class RunStats:
    """Rank -> client: what the rank did since the last report."""

    rank: int
    run: int
    micro_steps: int
    compute_seconds: float
    """In micro-steps, without `wait_seconds` and `streaming_wait_seconds`."""
    transfer_seconds: float
    """Transfers were under way, waited for or not."""
    wait_seconds: float
    """The rank stood still for transfers."""
    bytes_sent: dict[str, int]
    """Payload that left this rank, by mesh axis."""
    buffer_bytes: int
    """All K/V buffers at their largest."""
    peak_bytes: int
    """Device memory at its highest (CUDA), or largest resident set (CPU)."""
    blocks: dict[str, BlockStats] = field(default_factory=dict)
    """In a rehearsal (Load.only), by block "<list>.<index>"."""
    graphs: int = 0
    """Graphs compiled since the model was loaded."""
    attention: str = ""
    """Which attention kernels computed, and why, on a GPU."""
    arithmetic: str = ""
    """How quantised weights are computed with, in words. Empty: the rank has none."""
    streamed_bytes: int = 0
    """Weights that came from host memory to the device."""
    streaming_wait_seconds: float = 0.0
    """The rank stood still for them."""
    captured: int = 0
    """Micro-steps of which CUDA graphs were made."""
    replayed: int = 0
    """Micro-steps that were replays of such graphs."""
