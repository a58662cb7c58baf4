"""The K/V buffers of sampling runs."""

from collections.abc import Callable

from parallel_backend.rank.attention.kv_buffer import KVBuffer
from parallel_backend.wire.sampling import OpenRun, Step

from .conditioning_store import RankConditioning


class RunBuffers:
    """K/V buffers by run and conditioning. A buffer exists from its first micro-step until its run or conditioning is
    dropped."""

    def __init__(self):
        self.buffers: dict[tuple[int, int], KVBuffer] = {}
        """(run, conditioning) -> its buffer."""
        self._runs: dict[int, OpenRun] = {}
        self._largest = 0  # bytes of all buffers together, since the last `close_run`

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(each.nbytes for each in self.buffers.values())

    def open_run(self, run: OpenRun) -> None:
        self._runs[run.run] = run

    def close_run(self, run: int) -> int:
        """Drop the run's buffers. Returns the peak bytes of all runs' buffers together since the last `close_run`."""
        largest, self._largest = self._largest, 0
        self._runs.pop(run, None)
        self._drop(lambda key: key[0] == run)
        return largest

    def drop_conditioning(self, conditioning: int) -> None:
        self._drop(lambda key: key[1] == conditioning)

    def wait_pending(self) -> None:
        """Wait for all transfers to buffers. The buffers' next call writes the received rows."""
        for buffer in self.buffers.values():
            buffer.wait_pending()

    def clear(self) -> None:
        self._drop(lambda key: True)

    def begin_step(self, step: Step, conditioning: RankConditioning) -> KVBuffer:
        """The K/V buffer for a run's micro-step, created at the first one of its run and conditioning."""
        key = (step.run, step.conditioning)
        if key not in self.buffers:
            order = conditioning.token_order
            self.buffers[key] = KVBuffer(
                order.tokens, conditioning.batch, self._runs[step.run].extrapolate, correct=not order.references
            )
        if step.with_text:  # a call's text runs with its first band
            self.buffers[key].begin_call(float(step.timestep.max()))
        return self.buffers[key]

    def end_step(self, step: Step) -> None:
        """Record that the run's micro-step has written its tokens."""
        buffer = self.buffers[step.run, step.conditioning]
        buffer.filled = max(buffer.filled, step.tokens.stop)
        self._largest = max(self._largest, self.nbytes)

    def _drop(self, which: Callable[[tuple[int, int]], bool]) -> None:
        for key in [key for key in self.buffers if which(key)]:
            self.buffers.pop(key).wait_pending()
