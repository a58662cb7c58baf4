"""What crosses processes: plain dataclasses of numbers, strings, tuples and tensors, with an explicit encoding.

A message travels as one JSON header followed by the raw bytes of its tensors. Nothing is ever unpickled. Tensors arrive
on the CPU; where they go from there is the receiver's business.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from .layout import Span


@dataclass(frozen=True)
class Ready:
    """Rank -> client: the process is up and has joined its group."""

    rank: int


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
    compilation.py. `transfer_dtype`: one of config.TRANSFER_DTYPES.
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
class PutDecoder:
    """Client -> rank: hold this VAE decoder, in place of another one, until a model is loaded or unloaded.

    `name` stands for the weights. `tensors`: all of them, by diffusers' names (vae/keys.py), in the dtype to compute in.
    """

    name: str
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Decode:
    """Client -> rank: decode your rows of `latent` [B, C, H, W] by the decoder `name`. The reply repeats the number `run`.

    `bytes_needed`: of memory for one rank's rows, beside the weights.
    """

    run: int
    name: str
    latent: torch.Tensor
    bytes_needed: int


@dataclass(frozen=True)
class Decoded:
    """Rank -> client: the rank's rows [B, 3, rows, W] of the picture.

    None if the ranks do not hold that decoder or, where `short_of_memory`, one of them has too little. `bytes_sent`:
    payload that left this rank.
    """

    rank: int
    run: int
    pixels: torch.Tensor | None
    short_of_memory: bool
    bytes_sent: dict[str, int]


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
class ProbeLinks:
    """Client -> rank: with all the other ranks, time transfers of these sizes in bytes between every two of you."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class LinksProbed:
    """Rank -> client: the rank's device, and its links to later ranks.

    `links`: rank -> for each size (bytes, seconds one way). `peers`: rank -> its device's memory can be reached directly
    (P2P), for pairs of CUDA devices. `free_bytes`, `total_bytes`: of the device's memory; None for a CPU, whose memory all
    ranks share. `together`: seconds in which every rank sends the largest size to every other, all at once.
    """

    rank: int
    name: str
    free_bytes: int | None
    total_bytes: int | None
    links: dict[int, tuple[tuple[int, float], ...]]
    peers: dict[int, bool]
    together: float = 0.0


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
        *(Ready, Probe, Probed, Load, Loading, Loaded, Unload, Unloaded, PutConditioning, DropConditioning),
        *(DropAdapters, Adapt, Rescale, AdaptersSent, Adapted),
        *(PutDecoder, Decode, Decoded),
        *(Step, Output, OpenRun, CloseRun, RunStats, BlockStats, ProbeLinks, LinksProbed, Failure, Stop, Span),
        *(BeginTimeline, ReadTimeline, Timeline),
    )
}
_FIELDS = {cls: tuple(field.name for field in dataclasses.fields(cls)) for cls in _TYPES.values()}
_PLAIN = (int, str, bool, float, type(None))
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
}
MAX_HEADER_BYTES = 1 << 20
MAX_TENSOR_BYTES = 1 << 33


def encode(message: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Header and the tensors (CPU, contiguous) that follow it, in order."""
    tensors: list[torch.Tensor] = []

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach().to("cpu").contiguous())
            return {"$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
        if (names := _FIELDS.get(type(value))) is not None:
            return {"$type": type(value).__name__, **{name: plain(getattr(value, name)) for name in names}}
        if isinstance(value, (tuple, list)):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {"$dict": [[key, plain(item)] for key, item in value.items()]}
        assert type(value) in _PLAIN, f"{type(value)} cannot cross processes"
        return value

    return json.dumps(plain(message)).encode(), tensors


class BadMessage(ValueError):
    """The bytes are no message of ours."""


def decode_header(header: bytes) -> tuple[Any, list[torch.Tensor]]:
    """The message with empty tensors in place, and those tensors in the order in which their bytes follow.

    Raises BadMessage for anything malformed; allocates no more than the header's bounded sizes say.
    """
    tensors: list[torch.Tensor] = []

    def build(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(build(item) for item in value)
        if not isinstance(value, dict):
            return value
        if "$tensor" in value:
            dtype, shape = value["$tensor"]
            if not all(isinstance(size, int) and size >= 0 for size in shape):
                raise BadMessage(f"tensor shape {shape}")
            if math.prod(shape) * _DTYPES[dtype].itemsize > MAX_TENSOR_BYTES:
                raise BadMessage(f"tensor of {shape} {dtype} is larger than {MAX_TENSOR_BYTES} bytes")
            tensors.append(torch.empty(shape, dtype=_DTYPES[dtype]))
            return tensors[-1]
        if "$dict" in value:
            return {key: build(item) for key, item in value["$dict"]}
        fields = {name: build(item) for name, item in value.items() if name != "$type"}
        return _TYPES[value["$type"]](**fields)

    try:
        return build(json.loads(header)), tensors
    except BadMessage:
        raise
    except (ValueError, TypeError, KeyError, RuntimeError) as error:  # RuntimeError: nesting, sizes beyond torch's
        raise BadMessage(f"{type(error).__name__}: {error}") from error
