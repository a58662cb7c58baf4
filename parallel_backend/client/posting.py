"""Sends model calls and conditionings to the ranks of one model, and completes calls with the ranks' outputs."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.finite import all_finite
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.processes.pool import again
from parallel_backend.wire import messages as m

from .call import Conditioning, ModelCall, PostedCall, PostedStep, TokenLayout, fail
from .conditioning_cache import ConditioningCache
from .micro_step_queue import MicroSteps
from .not_finite import CauseSearch
from .scatter import Scatter


class Posting:
    """Sends conditionings and micro-steps in one order to all ranks, and completes calls. Thread-safe.

    `patch`: number of values of an output token for each channel. `wake()` is called before each micro-step is sent, since
    weights may have left the devices after its call was posted. `lock` is held while anything is sent for the model, so
    that all ranks get the messages in one order.
    """

    def __init__(
        self,
        degrees: Degrees,
        patch: int,
        scatter: Scatter,
        conditionings: ConditioningCache,
        causes: CauseSearch,
        wake: Callable[[], None],
        lock: threading.RLock,
    ):
        self._scatter, self._conditionings, self._causes, self._wake, self.lock = scatter, conditionings, causes, wake, lock
        self._micro_steps = MicroSteps(degrees, patch, self._send_step, scatter.shared.done, self._rows)
        self._error: Exception | None = None
        self.answered = 0
        """Number of calls with all outputs so far."""

    @property
    def cut(self) -> SequenceCut:
        """The cut of a stage's tokens over its sequence ranks."""
        return self._scatter.cut

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Context in which no other thread sends for this model. Raises the model's error if it has one, see `end`."""
        with self.lock:
            self.check()
            yield

    @property
    def alive(self) -> bool:
        """Whether the model has no error, see `end`."""
        return self._error is None

    def check(self) -> None:
        """Raise the model's error if it has one, see `end`."""
        if self._error is not None:
            raise again(self._error)

    def conditioning(self, call: ModelCall, layout: TokenLayout) -> Conditioning:
        """The ranks' copy of the call's conditioning, see ConditioningCache."""
        with self.in_order():
            return self._conditionings.find(call, layout)

    def post(self, call: PostedCall) -> None:
        """Queue the call's micro-steps; `call.future` gives tokens [B, n + a, c] on the CPU."""
        with self.lock:
            if self._error is None:
                self._micro_steps.post(call)
            else:
                fail(call.future, self._error)

    @property
    def busy(self) -> bool:
        """Whether micro-steps are under way or waiting."""
        with self.lock:
            return self._micro_steps.busy

    def abandon(self, which: Callable[[PostedCall], bool]) -> None:
        """Forget these calls: waiting micro-steps are not sent, and outputs of those under way are dropped."""
        with self.lock:
            self._micro_steps.forget(which)

    def end(self, error: Exception) -> None:
        """The model has left the ranks: every call, waiting or later, raises `error`."""
        with self.lock:
            self._error = error
            self._conditionings.clear()
            calls = self._micro_steps.end()
            self._scatter.shared.close()
        for call in calls:
            fail(call.future, error)

    def on_output(self, output: m.Output) -> None:
        """Add an output, and complete its call if this was the last one. BadMessage: see MicroSteps.accept."""
        finite = all_finite(output.value)
        with self.lock:
            accepted = self._micro_steps.accept(output, finite)
        if accepted is None:
            return
        assembly, complete, nonfinite = accepted
        if nonfinite:
            self._causes.fail(assembly.call, output.seq, assembly.first_seq)
        elif complete and not assembly.nonfinite:
            self.answered += 1
            assembly.call.future.set_result(assembly.tokens())

    def _send_step(self, replica: int, step: PostedStep) -> None:
        try:
            self._wake()
            self._scatter.step(replica, step)
        except BaseException:
            self._scatter.shared.done(step.seq)
            raise

    def _rows(self, call: PostedCall, index: int) -> tuple[Span, ...]:
        """Rows of the call's output that sequence rank `index` computes."""
        image, companion = call.rows(self.cut)[index]
        return (image, companion) if self.cut.gives_companion(index) else (image,)
