"""What crosses processes to measure devices and links (messages.py)."""

from dataclasses import dataclass


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
