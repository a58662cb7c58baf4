"""Links between devices: seconds of a transfer, of one pair alone and of all devices at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from parallel_backend.wire.messages import LinksProbed

SIZES = (1 << 10, 1 << 23)
"""Bytes of the transfers that are timed."""


@dataclass(frozen=True)
class Link:
    """A link in one direction between two devices: a transfer of b bytes takes `latency` + b / `bandwidth` seconds."""

    latency: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Links:
    """The links of a machine. Devices are numbers."""

    between: dict[tuple[int, int], Link]
    """Two devices, the lower one first -> their link while the others are idle."""
    crowding: float = 1.0
    """How many times slower links are while all devices send."""

    def link(self, one: int, two: int) -> Link:
        """Return the link with the latency and bandwidth that it has while all devices send."""
        quiet = self.between[min(one, two), max(one, two)]
        return Link(quiet.latency, quiet.bandwidth / self.crowding)

    def send(self, one: int, two: int, size: float) -> float:
        """Return the seconds of a transfer of one pair."""
        return self.link(one, two).seconds(size)

    def exchange(self, groups: Iterable[Sequence[int]], size: float) -> float:
        """Seconds of an all-to-all in every group at once: every device sends `size` bytes, evenly to the others."""
        slowest = 0.0
        for group in groups:
            part = size / (len(group) - 1)
            for one in group:
                links = [self.link(one, two) for two in group if two != one]
                seconds = max(link.latency for link in links) + sum(part / link.bandwidth for link in links)
                slowest = max(slowest, seconds)
        return slowest

    def shift(self, groups: Iterable[Sequence[int]], size: float) -> float:
        """Seconds of a ring step in every group at once: every device sends `size` bytes to the next one in the ring."""
        rings = ([*group, group[0]] for group in groups)
        return max(self.link(*pair).seconds(size) for ring in rings for pair in pairwise(ring))

    def all_reduce(self, groups: Sequence[Sequence[int]], size: float) -> float:
        """Return the seconds of an all-reduce in every group at once, of one tensor of `size` bytes on each device."""
        count = len(groups[0])
        return 2 * (count - 1) * self.shift(groups, size / count)


def alike(devices: int, link: Link) -> dict[tuple[int, int], Link]:
    """Return equal links between all devices."""
    return {(one, two): link for one in range(devices) for two in range(one + 1, devices)}


def links_of(probes: Sequence[LinksProbed]) -> Links:
    """Return the links as the ranks timed them. `probes`: by rank. Their crowding is the seconds of an exchange between all
    devices, divided by the seconds that idle links would take for it."""
    between = {(probe.rank, other): fit(times) for probe in probes for other, times in probe.links.items()}
    if not between:
        return Links({})
    quiet = Links(between).exchange([range(len(probes))], max(SIZES) * (len(probes) - 1))
    together = max(probe.together for probe in probes)
    return Links(between, max(1.0, together / quiet))


def fit(times: Sequence[tuple[int, float]]) -> Link:
    """Return the line through the shortest and the longest transfer. `times`: (bytes, seconds). The latency lies between 0
    and the seconds of the shortest transfer. The bandwidth is finite."""
    (small, quickest), (large, slowest) = min(times), max(times)
    slope = (slowest - quickest) / (large - small)
    if slope <= 0:  # noise
        slope = slowest / large
    return Link(max(0.0, quickest - slope * small), 1 / slope)
