"""Messages that ask ranks for timings of blocks and links, timelines, memory, and NaN and infinite values."""

from dataclasses import dataclass

import torch

from parallel_backend.core.own_class import OwnClass

PROBE_COLUMNS, PROBE_TEXT = 32, 64
"""Image tokens in a row, and text tokens, of the timed sequences."""


@dataclass(frozen=True)
class OwnCall:
    """A call of ComfyUI's own class: latent [1, C, (T,) H, W] or nested ones in their packed form, timestep [1] and
    conditioning."""

    x: torch.Tensor
    timestep: torch.Tensor
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Probe:
    """Client -> rank: time the blocks of the model at `path` on the rank's device. The rank drops the models that it has."""

    path: str
    dtype: str
    own_class: OwnClass
    """See Setup."""
    calls: tuple[OwnCall, ...] = ()
    """A call with a longer and a call with a shorter sequence."""


@dataclass(frozen=True)
class Probed:
    """Rank -> client: seconds of the blocks, in pairs for the longer and the shorter sequence."""

    rank: int
    blocks: dict[str, tuple[float, ...]]
    """Block list -> seconds of one of its blocks."""
    ends: tuple[float, ...]
    """Seconds of the modules before and behind the blocks."""
    free_bytes: int | None
    """Free device memory. None for a CPU, whose memory all ranks share."""


@dataclass(frozen=True)
class BeginTimeline:
    """Client -> rank: a sampling run begins. Drop the recorded spans."""


@dataclass(frozen=True)
class ReadTimeline:
    """Client -> rank: send the spans since the last BeginTimeline."""


@dataclass(frozen=True)
class Timeline:
    """Rank -> client: the recorded spans, see recorder.Recorder.read."""

    rank: int
    times: torch.Tensor
    """[n, 2] float64: start and stop in seconds."""
    labels: torch.Tensor
    """[n, 5] int64: kind and StepLabel."""
    lost: int
    """Number of older spans that were not kept."""


@dataclass(frozen=True)
class ReadMemory:
    """Client -> rank: answer DeviceMemoryReport."""


@dataclass(frozen=True)
class DeviceMemoryReport:
    """Rank -> client: bytes of the memory of its device."""

    rank: int
    place: str
    """Name of the memory. Ranks with equal names share one memory."""
    free_bytes: int | None
    """Bytes free for any process. None: unknown."""
    held_bytes: int
    """Bytes of the rank's model."""
    cached_bytes: int
    """Bytes that the rank's allocator keeps, free for this rank only, in addition to `free_bytes`."""
    total_bytes: int | None
    """None: unknown."""
    host: str = ""
    """Name of the machine, if it has memory apart from the device's. Empty: the device computes in host memory."""
    host_free_bytes: int | None = None
    """Bytes of the memory of machine `host` that weights may take. None without `host`."""
    copy_rate: float = 0.0
    """Bytes a second from host memory to the device. 0: unknown, or without `host`."""
    vae_bytes: int = 0
    """Bytes of VAE weights on a GPU, which are freed for a model (DropVAE)."""
    working_bytes: int = 0
    """The largest temporary memory of a micro-step of the rank's model since the last report. 0: none was computed, or it is
    unknown."""


@dataclass(frozen=True)
class ReleaseUnused:
    """Client -> rank: free the unused memory that the rank's allocator keeps. Answered by UnusedReleased."""


@dataclass(frozen=True)
class UnusedReleased:
    """Rank -> client: unused memory is freed; `freed_bytes` of it on a GPU. 0 on a CPU: the number is unknown."""

    rank: int
    freed_bytes: int


@dataclass(frozen=True)
class FindNotFinite:
    """Client -> rank: an output was not finite. Answer NotFiniteFound."""


@dataclass(frozen=True)
class NotFiniteFound:
    """Rank -> client: weights and additions of this rank with values that are not finite."""

    rank: int
    weights: tuple[str, ...]
    """Names of the first few parameters with such values."""
    adapters: tuple[str, ...]
    """Names of the first few parameters whose additions (LoRA) have such values."""


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
    """Name of the device, such as the GPU's model."""
    free_bytes: int | None
    """Free device memory. None for a CPU, whose memory all ranks share."""
    total_bytes: int | None
    """None for a CPU, too."""
    links: dict[int, tuple[tuple[int, float], ...]]
    """Later rank -> (bytes, seconds one way) for each size."""
    peers: dict[int, bool]
    """Other rank on a CUDA device -> whether this rank's device can access that one's memory directly (P2P)."""
    together: float = 0.0
    """Seconds in which every rank sends the largest size to every other rank at the same time."""
