"""The devices and the links between them, as the ranks found them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parallel_backend.client.placement.measurements import measured_links
from parallel_backend.core.devices import device_kind
from parallel_backend.processes.pool import Poll, Pool
from parallel_backend.wire.messages import LinksProbed

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of the transfers that are timed."""


HostFree = Callable[[], int | None]
"""Bytes of the host's memory that are free; None: unknown."""


@dataclass(frozen=True)
class Link:
    """A transfer of b bytes takes `latency` + b / `bandwidth` seconds one way."""

    latency: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """`links`: by two ranks, the lower one first. `host_free_bytes`: of the memory that CPU ranks share; None: unknown."""

    devices: tuple[str, ...]
    ranks: tuple[LinksProbed, ...]
    links: dict[tuple[int, int], Link]
    host_free_bytes: int | None = None

    def link(self, one: int, two: int) -> Link:
        return self.links[min(one, two), max(one, two)]

    @property
    def on_cpus(self) -> bool:
        return not any(device_kind(device) == "cuda" for device in self.devices)


def look_at(pool: Pool, host_free: HostFree, poll: Poll) -> Machine:
    """Takes the ranks' model away, and asks for the host's memory after that."""
    ranks = tuple(measured_links(pool, SIZES, poll))
    links = {(found.rank, other): fit(times) for found in ranks for other, times in found.links.items()}
    return Machine(pool.devices, ranks, links, host_free())


def fit(times: Sequence[tuple[int, float]]) -> Link:
    """The line through (bytes, seconds) with the least squares of relative errors, so that small transfers count too.

    Neither figure comes out negative or endless: the latency is at most the smallest transfer's, the bandwidth at least
    what the largest one shows on the whole.
    """
    weights = [1 / seconds**2 for _, seconds in times]
    total = sum(weights)
    size = sum(w * b for w, (b, _) in zip(weights, times, strict=True)) / total
    middle = sum(w * s for w, (_, s) in zip(weights, times, strict=True)) / total
    spread = sum(w * (b - size) ** 2 for w, (b, _) in zip(weights, times, strict=True))
    slope = sum(w * (b - size) * (s - middle) for w, (b, s) in zip(weights, times, strict=True)) / spread
    largest, slowest = max(times)
    if not 0 < slope <= slowest / largest:
        slope = slowest / largest
    return Link(min(max(0.0, middle - slope * size), min(times)[1]), 1 / slope)
