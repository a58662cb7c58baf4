"""Model calls and their conditionings on the way to the ranks of one model, and the outputs on the way back."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from parallel_backend.core.block_changes import BlockChanges
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.finite import all_finite
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import again
from parallel_backend.wire import messages as m

from .call import Call, Conditioning, PostedStep, fail
from .conditioning_cache import ConditioningCache
from .micro_step_queue import MicroSteps
from .scatter import Scatter
from .shared_residuals import SharedResiduals


class Posting:
    """Sends what calls need, in one order for all ranks, and hands out their outputs. Thread-safe.

    `patch`: values that an output's token has for each channel. `on_nonfinite(call, seq, first_seq)` is told once of a call
    with values that are not finite, and must end it; see not_finite.CauseSearch.
    """

    def __init__(self, pool: ModelRanks, degrees: Degrees, patch: int, on_nonfinite: Callable[[Call, int, int], None]):
        """Before the model is loaded; nothing may be posted until `start`."""
        self._degrees, self._on_nonfinite = degrees, on_nonfinite
        self.lock = threading.RLock()
        """Held while micro-steps are sent, and by whoever sends what must not come between two of them."""
        self.shared = SharedResiduals(degrees, pool)
        """Has the residuals of micro-steps under way. For what sends them, under this object's lock."""
        self._micro_steps = MicroSteps(degrees, patch, self._send_step, self.shared.done, self._rows)
        self._cut: SequenceCut | None = None
        self._scatter: Scatter | None = None
        self._conditionings: ConditioningCache | None = None
        self._wake: Callable[[], None] = lambda: None
        self._error: Exception | None = None

    def start(
        self, cut: SequenceCut, scatter: Scatter, conditionings: ConditioningCache, wake: Callable[[], None] = lambda: None
    ) -> None:
        """The model is about to be on the ranks, its tokens cut by `cut`. `wake` is called before each micro-step is sent:
        weights may have left the devices since its call was posted."""
        self._cut, self._scatter, self._conditionings, self._wake = cut, scatter, conditionings, wake

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Nobody else sends for this model in the meantime. Raises the model's error once there is one, see `end`."""
        with self.lock:
            self.check()
            yield

    @property
    def alive(self) -> bool:
        """The model is still on the ranks, for all that is known."""
        return self._error is None

    def check(self) -> None:
        """Raise the model's error once there is one, see `end`."""
        if self._error is not None:
            raise again(self._error)

    def conditioning(
        self,
        grid: tuple[int, ...],
        tensors: dict[str, torch.Tensor],
        first_replica: int,
        along: str,
        companion_tokens: int,
        changes: BlockChanges,
    ) -> Conditioning:
        """The ranks' own copy of these tensors, sent only if it is not there yet. Errors as of ConditioningCache."""
        self._conditionings.check_size(grid, tensors)
        with self.in_order():
            return self._conditionings.find(
                grid, tensors, first_replica % self._degrees.batch, along, companion_tokens, changes
            )

    def post(self, call: Call) -> None:
        """Queue the call's micro-steps; `call.future` gives tokens [B, n + a, c] on the CPU."""
        with self.lock:
            if self._error is None:
                self._micro_steps.post(call)
            else:
                fail(call.future, self._error)

    @property
    def busy(self) -> bool:
        """Micro-steps of a call are under way or wait to be sent."""
        with self.lock:
            return self._micro_steps.busy

    def abandon(self, which: Callable[[Call], bool]) -> None:
        """Forget these calls: micro-steps not sent yet never will be, those under way finish and are dropped."""
        with self.lock:
            self._micro_steps.forget(which)

    def end(self, error: Exception) -> None:
        """The model is on the ranks no more: every call, waiting or to come, raises `error`."""
        with self.lock:
            self._error = error
            if self._conditionings is not None:
                self._conditionings.clear()
            calls = self._micro_steps.end()
            self.shared.close()
        for call in calls:
            fail(call.future, error)

    def on_output(self, output: m.Output) -> None:
        """On a thread of the pool: hand out a call that this completes. BadMessage: see MicroSteps.accept."""
        finite = all_finite(output.value)
        with self.lock:
            found = self._micro_steps.accept(output, finite)
        if found is None:
            return
        assembly, complete, nonfinite = found
        if nonfinite:
            self._on_nonfinite(assembly.call, output.seq, assembly.first_seq)
        elif complete and not assembly.nonfinite:
            assembly.call.future.set_result(assembly.value)

    def _send_step(self, replica: int, step: PostedStep) -> None:
        try:
            self._wake()
            self._scatter.step(replica, step)
        except BaseException:
            self.shared.done(step.seq)
            raise

    def _rows(self, call: Call, index: int) -> tuple[Span, ...]:
        """Rows of the call's output that sequence rank `index` computes."""
        image, companion = call.rows(self._cut)[index]
        return (image, companion) if self._cut.gives_companion(index) else (image,)
