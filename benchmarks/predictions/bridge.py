"""Links of a machine with a bridge between groups of devices, such as two sockets."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from parallel_backend.placement.links import Links


@dataclass(frozen=True)
class BridgedLinks(Links):
    """All transfers that cross the bridge share its bandwidth."""

    socket: int = 0
    """Devices, counted from the first one, on each side of the bridge. 0: there is no bridge."""
    bridge: float = 0.0
    """The bridge's bytes a second, each way."""

    def crosses(self, one: int, two: int) -> bool:
        return bool(self.socket) and one // self.socket != two // self.socket

    def send(self, one: int, two: int, size: float) -> float:
        return max(super().send(one, two, size), size / self.bridge if self.crosses(one, two) else 0.0)

    def exchange(self, groups: Iterable[Sequence[int]], size: float) -> float:
        groups, crossing = list(groups), [0.0, 0.0]  # bytes each way
        for group in groups:
            part = size / (len(group) - 1)
            for one in group:
                far = sum(self.crosses(one, two) for two in group if two != one)
                crossing[one // self.socket % 2 if self.socket else 0] += part * far
        return max(super().exchange(groups, size), max(crossing) / self.bridge if self.bridge else 0.0)

    def shift(self, groups: Iterable[Sequence[int]], size: float) -> float:
        groups = list(groups)
        rings = ([*group, group[0]] for group in groups)
        crossing = sum(self.crosses(*pair) for ring in rings for pair in pairwise(ring)) / 2  # as many one way as the other
        return max(super().shift(groups, size), crossing * size / self.bridge if self.bridge else 0.0)
