"""Limits learnt from running out of GPU memory: the bytes of a model's weights that each rank may keep, by the run's size.
Estimates of a run's memory are not measured, so a run that fits by them may still run out. The next try streams that many
bytes more on the rank that ran out.
"""

import threading
from collections.abc import Mapping, Sequence

from parallel_backend.core.setup import Setup
from parallel_backend.placement.memory_model import Request

Size = tuple[tuple[int, ...], int]
"""(tokens along the axes of the largest image, its batch entries)."""


class Shortfalls:
    """Limits of the models in this process, separately for each size of a run. Thread-safe."""

    def __init__(self) -> None:
        self._most: dict[tuple[Setup, Size | None], dict[int, int]] = {}  # None: it ran out before any run
        self._lock = threading.Lock()

    def learn(self, setup: Setup, requests: Sequence[Request], rank: int, most: int) -> None:
        """`rank` ran out in a run of `requests`, or before any request. It may keep `most` bytes of weights."""
        with self._lock:
            self._most.setdefault((setup, size_of(requests)), {})[rank] = most

    def most(self, setup: Setup, requests: Sequence[Request], loading: bool = False) -> Mapping[int, int]:
        """By rank, the most bytes of weights on its device for a run of `requests`. Ranks that have not run out are missing.

        `loading`: `requests` are expected ones, whose batch may be another than the run's.
        """
        size = size_of(requests)
        with self._lock:
            known = [
                most
                for (model, other), most in self._most.items()
                if model == setup and (other in (None, size) or (loading and (size is None or other[0] == size[0])))
            ]
        return {
            rank: min(most[rank] for most in known if rank in most) for rank in {rank for most in known for rank in most}
        }


def size_of(requests: Sequence[Request]) -> Size | None:
    """None: no run is known."""
    if not requests:
        return None
    largest = max(requests, key=lambda request: request.image * request.entries)
    return largest.picture, largest.entries
