"""Messages that ask what ranks know: timed blocks and links, timelines, free memory, values that are not finite."""

from dataclasses import dataclass

import torch

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
class BeginTimeline:
    """Client -> rank: a sampling run begins; forget the spans of the one before."""


@dataclass(frozen=True)
class ReadTimeline:
    """Client -> rank: send the spans since the last BeginTimeline."""


@dataclass(frozen=True)
class Timeline:
    """Rank -> client: `times` and `labels` as recorder.Recorder.read gives them; `lost`: older spans that were not kept."""

    rank: int
    times: torch.Tensor
    labels: torch.Tensor
    lost: int


@dataclass(frozen=True)
class ReadMemory:
    """Client -> rank: how much memory is there?"""


@dataclass(frozen=True)
class RankMemory:
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


@dataclass(frozen=True)
class FindNotFinite:
    """Client -> rank: an output was not finite; what do you know of it?

    Only micro-steps of the sampling run `run` (0: of none) count, from number `since` on.
    """

    run: int
    since: int


@dataclass(frozen=True)
class NotFiniteFound:
    """Rank -> client: where values that are not finite began on this rank.

    `seq`: the first micro-step whose result was not finite, None if all were. `weights`, `adapters`: names of the first few
    parameters, and of layers with an adapter, that hold such values.
    """

    rank: int
    seq: int | None
    weights: tuple[str, ...]
    adapters: tuple[str, ...]


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
