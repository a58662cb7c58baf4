"""Sampling runs on the ranks of one model: opened, closed, given up, and recorded."""

import itertools

from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import Poll, wait_for
from parallel_backend.wire import messages as m

from .memory_guard import MemoryGuard
from .posting import Posting


class Runs:
    """Runs by number. Under a run's number its calls keep their K/V buffers on the ranks."""

    def __init__(self, ranks: ModelRanks, posting: Posting, memory: MemoryGuard):
        self._ranks, self._posting, self._memory = ranks, posting, memory
        self._numbers = itertools.count(1)

    def open(self, extrapolate: bool) -> int:
        """The number of a new run. `extrapolate`: see sampling.OpenRun."""
        with self._posting.in_order():
            run = next(self._numbers)
            self._ranks.tell(m.OpenRun(run, extrapolate))
            return run

    def close(self, run: int, poll: Poll) -> list[m.RunStats]:
        """Drop the run's buffers. What each rank did since the last report, in rank order."""
        self._memory.forget(run)
        self._posting.check()
        return wait_for(self._ranks.ask(m.CloseRun(run), m.RunStats), poll)

    def abandon(self, run: int) -> None:
        """Forget the run's calls, see Posting.abandon. The run stays open."""
        self._posting.abandon(lambda call: call.run == run)

    def discard(self, run: int) -> None:
        """Give the run up without waiting. Micro-steps that were sent (a window at most) still finish on the ranks."""
        self.abandon(run)
        self._memory.forget(run)
        if self._posting.alive and self._ranks.error is None:
            self._ranks.tell(m.CloseRun(run))

    def begin_timeline(self) -> None:
        """A sampling run begins: the ranks forget what they recorded, and memory is looked at anew."""
        self._memory.refresh()
        self._ranks.tell(m.BeginTimeline())

    def timeline(self, poll: Poll) -> list[m.Timeline]:
        """What each rank did when since the last `begin_timeline`, or since it was loaded, in rank order.

        Raises RankError, and ends the ranks, if one's answer has another shape or holds values that are not finite.
        """
        found = wait_for(self._ranks.ask(m.ReadTimeline(), m.Timeline), poll)
        for each in found:
            spans = len(each.times)
            if (each.times.shape, each.labels.shape) != ((spans, 2), (spans, 5)) or not each.times.isfinite().all():
                raise self._ranks.refuse(each.rank, f"a timeline of {list(each.times.shape)} and {list(each.labels.shape)}")
        return found
