"""A rank's timeline: spans of its micro-steps, transfers and waits since the last run began, and their sums. A run's report
needs the sums, and Parallel Trace the spans of a past run, so they are recorded in every run."""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from parallel_backend.wire.timeline_kinds import FETCH, OUTSIDE, WAIT, WORK, StepLabel


class Recorder:
    """Records spans, the newest CAPACITY of them, in the order in which they ended. Sums by kind cover all spans.

    Times are seconds of `time.perf_counter`, which is one clock for all processes of a machine. On CUDA, `event` records an
    event in the stream, and events stand for times. They are read BATCH at a time, after UNREAD newer spans have been added:
    by then the device has passed them, and the host does not wait.
    """

    CAPACITY = 1 << 16
    UNREAD = 4096
    BATCH = 64

    def __init__(self, event: Callable[[], Any] | None):
        self._event = event
        self._spans: deque[tuple] = deque(maxlen=self.CAPACITY)
        self._unread: deque[tuple] = deque()
        self._seconds: dict[int, float] = defaultdict(float)
        self._waited_in_steps = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin a run: drop earlier spans, but not their sums. On CUDA this waits for the stream, to relate its time to the
        host's clock."""
        self._read_events(len(self._unread))
        self._spans.clear()
        self._recorded = 0
        self.step = OUTSIDE
        if self._event is not None:
            self._anchor = self._event()
            self._anchor.synchronize()
            self._anchored = time.perf_counter()

    def add(self, kind: int, step: StepLabel, start: Any, stop: Any) -> None:
        """Add a span. `step`: the micro-step in which it began."""
        self._recorded += 1
        if self._event is None:
            self._keep(kind, step, start, stop)
            return
        self._unread.append((kind, step, start, stop))
        if len(self._unread) == self.UNREAD + self.BATCH:
            self._read_events(self.BATCH)

    def drain(self, kind: int) -> float:
        """Like `seconds`, but the sum starts again at zero."""
        seconds = self.seconds(kind)
        self._seconds.pop(kind, None)
        return seconds

    def seconds(self, kind: int) -> float:
        """Seconds of all spans of this kind since the last `drain`. On CUDA the host waits for the end of the last span."""
        self._read_events(len(self._unread))
        return self._seconds.get(kind, 0.0)

    def drain_computing(self) -> float:
        """Seconds of micro-steps in which the rank did not wait, since the last call. Drains WORK."""
        seconds, self._waited_in_steps = self.drain(WORK) - self._waited_in_steps, 0.0
        return seconds

    def read(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return (starts and stops, float64 [N, 2]; kinds and StepLabels, int64 [N, 5]; number of older spans that were
        dropped)."""
        self._read_events(len(self._unread))
        times_N2 = torch.tensor([span[2:] for span in self._spans], dtype=torch.float64).reshape(-1, 2)
        labels_N5 = torch.tensor([(kind, *step) for kind, step, _, _ in self._spans], dtype=torch.int64).reshape(-1, 5)
        return times_N2, labels_N5, self._recorded - len(self._spans)

    def _read_events(self, count: int) -> None:
        """Read the events of the `count` oldest unread spans."""
        oldest = [self._unread.popleft() for _ in range(count)]
        if not oldest:
            return
        last = oldest[-1][3]
        last.synchronize()
        # Relative to the newest event that was read before: CUDA returns differences in float32, exact enough if small.
        read, end = None, self._anchored
        for kind, step, start, stop in oldest:
            if stop is not read:  # a transfer and the wait for it end together
                read, end = stop, self._anchored + self._anchor.elapsed_time(stop) / 1000
            self._keep(kind, step, end - start.elapsed_time(stop) / 1000, end)
        self._anchor, self._anchored = last, self._spans[-1][3]

    def _keep(self, kind: int, step: StepLabel, start: float, stop: float) -> None:
        self._spans.append((kind, step, start, stop))
        self._seconds[kind] += stop - start
        if kind in (WAIT, FETCH) and step != OUTSIDE:
            self._waited_in_steps += stop - start
