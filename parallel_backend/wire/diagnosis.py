"""Messages that ask ranks for timings of blocks and links, timelines, memory use, and NaN and infinite values."""

from dataclasses import dataclass

import torch

from parallel_backend.core.own_class import OwnClass

PROBE_COLUMNS, PROBE_TEXT = 32, 64
"""The number of image tokens in a row, and of text tokens, of the sequences whose computation is timed."""


@dataclass(frozen=True)
class OwnCall:
    """A call of ComfyUI's own class: its latent [1, C, (T,) H, W], or nested latents in their packed form; its timestep [1]
    and its conditioning."""

    x: torch.Tensor
    timestep: torch.Tensor
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Probe:
    """Client -> rank: time the blocks of the model at `path` on the rank's device. The rank first drops the models that it
    has."""

    path: str
    dtype: str
    own_class: OwnClass
    """See Setup."""
    calls: tuple[OwnCall, ...] = ()
    """One call with a longer sequence and one with a shorter sequence."""


@dataclass(frozen=True)
class Probed:
    """Rank -> client: the blocks' compute times in seconds, in pairs for the longer and the shorter sequence."""

    rank: int
    blocks: dict[str, tuple[float, ...]]
    """Name of a block list -> seconds for one of its blocks."""
    ends: tuple[float, ...]
    """Seconds for the modules before and after the blocks."""
    free_bytes: int | None
    """Free device memory. None for a CPU, because all ranks share its memory."""


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
    """The number of older spans that were dropped."""


@dataclass(frozen=True)
class ReadMemory:
    """Client -> rank: answer with DeviceMemoryReport."""


@dataclass(frozen=True)
class DeviceMemoryReport:
    """Rank -> client: how many bytes of its device's memory are free and used."""

    rank: int
    place: str
    """Name of the memory. Ranks that report the same name share one memory."""
    free_bytes: int | None
    """Bytes that any process may allocate. None: unknown."""
    held_bytes: int
    """Bytes that the rank's model takes."""
    cached_bytes: int
    """Bytes that the rank's allocator caches. Only this rank can use them; `free_bytes` does not include them."""
    total_bytes: int | None
    """Size of the memory in bytes. None: unknown."""
    host: str = ""
    """Name of the machine, if its memory is not the device's memory. Empty: the device computes in host memory."""
    host_free_bytes: int | None = None
    """Bytes of host memory of the machine `host` that weights may take. None if `host` is empty."""
    copy_rate: float = 0.0
    """Bytes per second from host memory to the device. 0: unknown, or `host` is empty."""
    vae_bytes: int = 0
    """Bytes of VAE weights on a GPU. They are freed when a model needs the memory (DropVAE)."""
    working_bytes: int = 0
    """The largest temporary memory of a micro-step of the rank's model since the last report. 0: no micro-step was computed,
    or the number is unknown."""


@dataclass(frozen=True)
class ReleaseUnused:
    """Client -> rank: free the unused memory that the rank's allocator caches. Answered by UnusedReleased."""


@dataclass(frozen=True)
class UnusedReleased:
    """Rank -> client: `freed_bytes` of unused GPU memory were freed. 0 on a CPU, because the number is unknown."""

    rank: int
    freed_bytes: int


@dataclass(frozen=True)
class ProbeLinks:
    """Client -> rank: time transfers between every two ranks. All ranks take part."""

    sizes: tuple[int, ...]
    """The size of each transfer in bytes."""


@dataclass(frozen=True)
class LinksProbed:
    """Rank -> client: the rank's device, and its links to later ranks."""

    rank: int
    name: str
    """Name of the device, such as the GPU's product name."""
    free_bytes: int | None
    """Free device memory. None for a CPU, because all ranks share its memory."""
    total_bytes: int | None
    """Size of the device memory. None for a CPU."""
    links: dict[int, tuple[tuple[int, float], ...]]
    """Later rank -> a pair (bytes, seconds in one direction) for each size."""
    together: float = 0.0
    """Seconds that it takes if every rank sends the largest size to every other rank at the same time."""
