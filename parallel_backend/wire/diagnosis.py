"""Messages that ask ranks for timings of blocks and links, timelines, memory, and values that are not finite."""

from dataclasses import dataclass

import torch

PROBE_COLUMNS, PROBE_TEXT = 32, 64
"""Image tokens in a row of the timed sequences, and text tokens beside them."""


@dataclass(frozen=True)
class Probe:
    """Client -> rank: time this model's blocks on the rank's device. Drops whatever model the rank held."""

    path: str
    dtype: str
    rows: tuple[int, int]
    """Token rows of a longer and a shorter sequence. 32 rows are a picture of 512 x 512."""


@dataclass(frozen=True)
class Probed:
    """Rank -> client: seconds of the blocks. Pairs are for the longer and the shorter sequence."""

    rank: int
    blocks: dict[str, tuple[float, ...]]
    """Block list -> seconds of one of its blocks."""
    ends: tuple[float, ...]
    """Seconds of all that is not in a block."""
    free_bytes: int | None
    """Of the device's memory. None for a CPU, whose memory all ranks share."""
    keeping: float = 0.0
    """Seconds that a call takes for a byte of keys and values that it keeps. 0: not measured."""


@dataclass(frozen=True)
class BeginTimeline:
    """Client -> rank: a sampling run begins. Forget the spans of the run before."""


@dataclass(frozen=True)
class ReadTimeline:
    """Client -> rank: send the spans since the last BeginTimeline."""


@dataclass(frozen=True)
class Timeline:
    """Rank -> client: the recorded spans, as of recorder.Recorder.read."""

    rank: int
    times: torch.Tensor
    """[n, 2] float64: start and stop in seconds."""
    labels: torch.Tensor
    """[n, 5] int64: kind and StepLabel."""
    lost: int
    """Older spans that were not kept."""


@dataclass(frozen=True)
class ReadMemory:
    """Client -> rank: answer DeviceMemoryReport."""


@dataclass(frozen=True)
class DeviceMemoryReport:
    """Rank -> client: bytes of its device's memory. None where that is not known."""

    rank: int
    place: str
    """Ranks of equal places share one memory."""
    free_bytes: int | None
    """Free for whoever asks."""
    held_bytes: int
    """What the rank's model has of it."""
    cached_bytes: int
    """Free for this rank alone, beside `free_bytes`."""
    total_bytes: int | None
    host: str = ""
    """Name of the machine whose memory is there beside the device's. Empty: the device's memory is the machine's own."""
    host_free_bytes: int | None = None
    """Free in that machine's memory. None without such a machine."""
    copy_rate: float = 0.0
    """Bytes a second from that memory to the device. 0: not known, or without such a machine."""
    vae_bytes: int = 0
    """What parts of VAEs have of a GPU's memory. They make way for a model (DropVAE)."""


@dataclass(frozen=True)
class ReleaseUnused:
    """Client -> rank: give back what your allocator keeps for later."""


@dataclass(frozen=True)
class UnusedReleased:
    """Rank -> client: done; bytes of its GPU's memory that have come free. On a CPU, where they are not known, 0."""

    rank: int
    freed_bytes: int


@dataclass(frozen=True)
class FindNotFinite:
    """Client -> rank: an output was not finite. Answer NotFiniteFound."""

    run: int
    """Only micro-steps of this run count. 0: those outside of runs."""
    since: int
    """Only micro-steps from this number on count."""


@dataclass(frozen=True)
class NotFiniteFound:
    """Rank -> client: where values that are not finite began on this rank."""

    rank: int
    seq: int | None
    """First micro-step whose result was not finite. None: all were finite."""
    weights: tuple[str, ...]
    """Names of the first few parameters with such values."""
    adapters: tuple[str, ...]
    """Names of the first few layers with an adapter with such values."""


@dataclass(frozen=True)
class ProbeLinks:
    """Client -> rank: time transfers between every two ranks. Every rank takes part."""

    sizes: tuple[int, ...]
    """Bytes of each transfer."""


@dataclass(frozen=True)
class LinksProbed:
    """Rank -> client: the rank's device, and its links to later ranks."""

    rank: int
    name: str
    """What the device is, such as the GPU's name."""
    free_bytes: int | None
    """Of the device's memory. None for a CPU, whose memory all ranks share."""
    total_bytes: int | None
    """As `free_bytes`."""
    links: dict[int, tuple[tuple[int, float], ...]]
    """Later rank -> (bytes, seconds one way) for each size."""
    peers: dict[int, bool]
    """Other rank with a CUDA device -> this rank's device can reach its memory directly (P2P)."""
    together: float = 0.0
    """Seconds in which every rank sends the largest size to every other rank, all at once."""
