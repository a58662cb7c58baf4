"""Messages of a sampling run: conditioning, micro-steps, their outputs, and what a run cost."""

from dataclasses import dataclass, field

import torch

from parallel_backend.core.spans import Span


@dataclass(frozen=True)
class PutConditioning:
    """Client -> rank: what a set of model calls shares. `tensors`: only those that this rank needs, by the family's names.

    Tensors have the batch entries of this replica as first axis; token tensors are cut to the rank's own shard.
    """

    id: int
    grid: tuple[int, ...]  # tokens per image axis, (rows, columns) or (frames, rows, columns)
    references: int  # tokens of reference pictures
    text_tokens: int  # of the whole text, over all ranks
    batch: int
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class DropConditioning:
    id: int


@dataclass(frozen=True)
class Step:
    """Client -> rank: one micro-step. `tokens`: the band's span of image tokens, over all ranks of the stage.

    `run` names the K/V buffers to use (0: none, the step is exact and leaves nothing behind). `x` is the rank's own
    shard [entries, n, channels], for the first stage only. `timestep`: float32 as the sampler gave it, see
    families.base.StepInputs. `residuals`: block "<list>.<index>" of the stage -> which of `added` [entries, m, hidden] a
    ControlNet adds behind it, to the picture's tokens among the rank's. `stale`: displaced patches use each other's keys
    of the call before. `overlap`: transfers run beside compute where they can, rather than being waited for at once.
    """

    seq: int
    run: int
    conditioning: int
    tokens: Span
    with_text: bool
    stale: bool
    overlap: bool
    entries: Span
    timestep: torch.Tensor
    residuals: dict[str, int]
    added: tuple[torch.Tensor, ...]
    x: torch.Tensor | None


@dataclass(frozen=True)
class Output:
    """Rank of the last stage -> client: the rank's shard of the prediction, [entries, n, channels]."""

    rank: int
    seq: int
    value: torch.Tensor


@dataclass(frozen=True)
class OpenRun:
    """Client -> rank: how the steps of this run are to be done.

    `extrapolate`: stale keys and values are moved on to the present call, rather than used as they are.
    """

    run: int
    extrapolate: bool


@dataclass(frozen=True)
class CloseRun:
    """Client -> rank: the run is over; drop its K/V buffers and report."""

    run: int


@dataclass(frozen=True)
class BlockStats:
    """What one block did in a rehearsal since the last report: `seconds` of all its calls, its transfers included."""

    seconds: float
    bytes_sent: dict[str, int]


@dataclass(frozen=True)
class RunStats:
    """Rank -> client, for the time since the last report. Bytes are payload that left this rank, by mesh axis.

    `blocks`: in a rehearsal (Load.only), by block "<list>.<index>". `graphs`: compiled since the model was loaded.
    """

    rank: int
    run: int
    micro_steps: int
    compute_seconds: float
    transfer_seconds: float  # transfers under way
    wait_seconds: float  # of it standing still for them
    bytes_sent: dict[str, int]
    buffer_bytes: int  # K/V buffers of the run at their largest
    peak_bytes: int  # device memory at its highest (CUDA) or resident set (CPU)
    blocks: dict[str, BlockStats] = field(default_factory=dict)
    graphs: int = 0
