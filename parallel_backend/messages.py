"""What crosses processes: plain dataclasses of numbers, strings, tuples and tensors (encoding.py).

Whole numbers are never below 0, and every number is finite. Tensors arrive on the CPU; where they go from there is the
receiver's business. What a rank sends, and nothing else, has a field `rank`.
"""

from dataclasses import dataclass, field

import torch

from .doctor.messages import LinksProbed, ProbeLinks
from .encoding import BadMessage as BadMessage
from .encoding import Encoding
from .layout import Span
from .vae.messages import Decode, Decoded, PutDecoder


@dataclass(frozen=True)
class Ready:
    """Rank -> client: the process is up and has joined its group."""

    rank: int


START_UP, IDLE = "start-up", "idle"
"""What a rank is doing when it does nothing that a message told it to."""


@dataclass(frozen=True)
class Beat:
    """Rank -> client, about every second as long as the process runs: see pulse.Pulse."""

    rank: int
    doing: str
    progress: int
    waiting: bool


PROBE_COLUMNS, PROBE_TEXT = 32, 64
"""Image tokens in a row of the sequences that are timed, and text tokens beside them."""


@dataclass(frozen=True)
class Probe:
    """Client -> rank: time this model's blocks on your device; drops whatever model the rank held.

    `rows`: of a longer sequence and a shorter one. 32 rows are a picture of 512 x 512.
    """

    path: str
    dtype: str
    rows: tuple[int, int] = (32, 8)


@dataclass(frozen=True)
class Probed:
    """Rank -> client: seconds of one block of each list and of what surrounds them, for the longer sequence and the shorter.

    `free_bytes`: of the device's memory; None for a CPU, whose memory all ranks share.
    """

    rank: int
    blocks: dict[str, tuple[float, ...]]
    ends: tuple[float, ...]
    free_bytes: int | None


@dataclass(frozen=True)
class Load:
    """Client -> rank: load the rank's own part of a model; replaces whatever model the rank held.

    `degrees`: the mesh sizes. `patch_shares`: each patch rank's share of the tokens. `stage_blocks`: per stage, the span
    of blocks it owns (all block lists counted through). `only`: for a rehearsal, "<list>.<index>" of the blocks that are
    there; the others hand on what they are given, and RunStats say what these cost. Empty: all. `compile`: see
    compilation.py. `transfer_dtype`: one of config.TRANSFER_DTYPES. `fingerprint`: what the files must have, see
    fingerprint.py; empty where they are this machine's own.
    """

    path: str
    dtype: str
    degrees: tuple[int, ...]
    patch_mode: str
    patch_shares: tuple[float, ...]
    stage_blocks: tuple[Span, ...]
    attention: str
    only: tuple[str, ...] = ()
    compile: bool = False
    transfer_dtype: str = "full"
    fingerprint: str = ""


@dataclass(frozen=True)
class Loading:
    """Rank -> client, for every percent while it loads: the share of its weights, in bytes, that are in place."""

    rank: int
    fraction: float


@dataclass(frozen=True)
class Loaded:
    """Rank -> client: the model is in place; `weight_bytes` is what this rank holds of it, `parameters` are their names."""

    rank: int
    weight_bytes: int
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Unload:
    """Client -> rank: drop the model and everything that belongs to it."""


@dataclass(frozen=True)
class Unloaded:
    rank: int


@dataclass(frozen=True)
class DropAdapters:
    """Client -> rank: the model's weights count as they are in the checkpoint again."""


@dataclass(frozen=True)
class Adapt:
    """Client -> rank: add `scale` * `up` [out, r] @ `down` [r, in] to one of the rank's parameters, beside what is there.

    Without `down`, `up` has the parameter's shape. Both are whole: the rank takes its shard of them.
    """

    parameter: str
    up: torch.Tensor
    down: torch.Tensor | None
    scale: float


@dataclass(frozen=True)
class Rescale:
    """Client -> rank: other scales for the factors of every Adapt since the last DropAdapters, in order."""

    scales: tuple[float, ...]


@dataclass(frozen=True)
class AdaptersSent:
    """Client -> rank: say when all that was sent is in place. `run`: a number that the reply repeats."""

    run: int


@dataclass(frozen=True)
class Adapted:
    """Rank -> client: the adapters are in place and take `adapter_bytes` on this rank."""

    rank: int
    run: int
    adapter_bytes: int


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


@dataclass(frozen=True)
class BeginTimeline:
    """Client -> rank: a sampling run begins; forget the spans of the one before."""


@dataclass(frozen=True)
class ReadTimeline:
    """Client -> rank: send the spans since the last BeginTimeline. `run`: a number that the reply repeats."""

    run: int


@dataclass(frozen=True)
class Timeline:
    """Rank -> client: `times` and `labels` as timeline.Recorder.read gives them; `lost`: older spans that were not kept."""

    rank: int
    run: int
    times: torch.Tensor
    labels: torch.Tensor
    lost: int


@dataclass(frozen=True)
class ReadMemory:
    """Client -> rank: how much memory is there? `run`: a number that the reply repeats."""

    run: int


@dataclass(frozen=True)
class Memory:
    """Rank -> client: bytes of the memory `place`, which ranks of equal places share. None where it is not known.

    `free_bytes`: for whoever asks; `cached_bytes`: beside them, free for this rank alone. `held_bytes`: what the rank's
    model has of it.
    """

    rank: int
    run: int
    place: str
    free_bytes: int | None
    held_bytes: int
    cached_bytes: int
    total_bytes: int | None


@dataclass(frozen=True)
class FindNotFinite:
    """Client -> rank: an output was not finite; what do you know of it? `run`: a number that the reply repeats."""

    run: int


@dataclass(frozen=True)
class NotFiniteFound:
    """Rank -> client: the first of its last micro-steps, if any, whose own result was not finite, and names of parameters
    (a few), or of layers' adapters, that are not.
    """

    rank: int
    run: int
    seq: int | None
    weights: tuple[str, ...]
    adapters: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """Rank -> client: the rank is about to end. `peer`: it failed in a transfer, so the cause may lie with another rank."""

    rank: int
    doing: str
    peer: bool
    summary: str
    traceback: str


@dataclass(frozen=True)
class Stop:
    """Client -> rank: end the process."""


_TYPES = {
    cls.__name__: cls
    for cls in (
        *(Ready, Beat, Probe, Probed, Load, Loading, Loaded, Unload, Unloaded, PutConditioning, DropConditioning),
        *(DropAdapters, Adapt, Rescale, AdaptersSent, Adapted),
        *(PutDecoder, Decode, Decoded),
        *(Step, Output, OpenRun, CloseRun, RunStats, BlockStats, ProbeLinks, LinksProbed, Failure, Stop, Span),
        *(BeginTimeline, ReadTimeline, Timeline),
        *(ReadMemory, Memory, FindNotFinite, NotFiniteFound),
    )
}
_ENCODING = Encoding(_TYPES.values())
encode, decode_header = _ENCODING.encode, _ENCODING.decode
