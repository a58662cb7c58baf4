"""Work of the pack's HTTP routes that takes long, on threads of its own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
MOST = 2
"""Pieces of work at a time: one runs, one waits."""


class Busy(Exception):
    """Raised if other requests' work already runs and waits."""


class LongWork:
    """One thread for one route, because ComfyUI serves its page on asyncio's threads. Used on the event loop alone."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(1, f"parallel-dit {name}")
        self._begun: list[Future] = []

    async def done(self, work: Callable[[], T]) -> T:
        """`work()`. Busy if another piece of work runs and one waits."""
        self._begun = [each for each in self._begun if not each.done()]
        if len(self._begun) >= MOST:
            raise Busy
        self._begun.append(future := self._thread.submit(work))
        return await asyncio.wrap_future(future)
