"""One fault from beginning to end: what came of the prompt, of the next one, and what was left behind."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parallel_backend.client.registry import Registry
from parallel_backend.processes.pool import STOP_SECONDS
from parallel_backend.processes.watchdog import START_SECONDS

from . import rank
from .fault import Fault
from .session import ALONE, FaultSession
from .table import AT_ONCE, EITHER, ERROR, KINDS, PATIENCE, RIGHT, SILENCE, START, ending, lives, says, within

LIMIT = 5.0
"""Seconds from a fault to the error, or what is added to the time for which the watchdog waits."""
SETTLE = 5.0
"""Seconds in which everything must be gone that an ended pool had."""
PROMPT = 60.0
"""Seconds that a prompt may take which nothing disturbs, the start of its ranks included."""
STRIKE = 90.0
"""Seconds until the fault has struck."""
STARTED, PATIENT = 20.0, 3.0
"""Seconds for which the watchdog lets a start, or work, come no further; the product's own are for slow machines."""
IMPORTS = 15.0
"""Seconds for another rank to get as far as it can: the watchdog counts from then on."""


@dataclass
class Verdict:
    """`seconds`: from the fault to the prompt's end. `error`: what it ended with. `problems`: what is not as promised."""

    fault: Fault
    seconds: float | None = None
    error: str | None = None
    problems: list[str] = field(default_factory=list)


class Attempt:
    """A call in a thread of its own, so that one that never ends is found out."""

    def __init__(self, call: Callable[[], Any]):
        self.value: Any = None
        self.error: BaseException | None = None
        self.ended: float | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, name="prompt", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = self._call()
        except BaseException as error:
            self.error = error
        self.ended = rank.now()

    def wait(self, go_on: Callable[[], bool]) -> bool:
        """False if it has not ended when `go_on` says so."""
        while self._thread.is_alive() and go_on():
            self._thread.join(0.01)
        return not self._thread.is_alive()

    def where(self) -> str:
        """The line it is at."""
        frame = sys._current_frames().get(self._thread.ident)
        return "".join(traceback.format_stack(frame)[-4:]) if frame is not None else ""

    def text(self) -> str | None:
        error, self.error = self.error, None  # its traceback holds on to the pool
        return None if error is None else f"{type(error).__name__}: {error}"


class Trial:
    """`factor`: how much slower than an idle one this machine may be."""

    def __init__(self, session: FaultSession, fault: Fault, factor: float):
        self.session, self.fault, self.kind, self.factor = session, fault, KINDS[fault.kind], factor
        self.within, self.patience = within(fault, self.kind), 0.0
        self.begun = rank.now()

    def run(self) -> Verdict:
        verdict = Verdict(self.fault)
        files = [self.session.folder / name for name in (rank.ARMED, rank.FIRED, rank.ACTED)]
        for file in files:
            file.unlink(missing_ok=True)
        self.session.starts_within = START_SECONDS if self.within != START else self.factor * STARTED
        preparing = Attempt(lambda: self.session.prepare(self.fault))
        if not self._ends(preparing, 3 * PROMPT, verdict, "what comes before"):
            return verdict
        if self.within == PATIENCE:
            self.patience = self.session.bound(self.factor * PATIENT)
        before = self._pids()
        rank.write(files[0], dataclasses.asdict(self.fault))
        self.begun = rank.now()
        attempt = Attempt(lambda: self.session.attempt(self.fault, self._early))
        if not attempt.wait(self._in_time):
            verdict.problems.append(f"the prompt has not ended:\n{attempt.where()}")
            self._end_by_force(attempt)
        struck = self._struck()
        for file in files:
            file.unlink(missing_ok=True)
        self._judge(verdict, attempt, struck)
        after = Attempt(lambda: self.session.is_right_again(self.fault.degrees))
        self._judge_next(verdict, after, before)
        return verdict

    def _struck(self) -> float | None:
        """When."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.session.folder / rank.FIRED).read_text())["at"]
        return None

    @property
    def allowed(self) -> float:
        """Seconds from the fault to the end of the prompt."""
        if self.fault.phase == "closing":
            return self.factor * (STOP_SECONDS + LIMIT)
        if self.kind.ending != ERROR:
            return self.factor * PROMPT
        starts = self.factor * (STARTED + IMPORTS)
        late = {AT_ONCE: 0.0, SILENCE: self.session.silence, PATIENCE: self.patience, START: starts}
        return self.factor * LIMIT + late[self.within]

    def _early(self) -> bool:
        """Whether an idle rank's fault may still show."""
        long_enough = ALONE if self.kind.ending == RIGHT else self.allowed
        struck = self._struck()
        return rank.now() < (self.begun + STRIKE if struck is None else struck + long_enough)

    def _in_time(self) -> bool:
        struck = self._struck()
        if struck is None:
            return rank.now() < self.begun + self.factor * (STRIKE + PROMPT)
        idle = self.allowed if self.fault.phase == "idle" else 0.0
        return rank.now() < struck + 2 * self.allowed + idle + self.factor * PROMPT

    def _pids(self) -> tuple[int, ...]:
        pool = self.session.pool()
        return () if pool is None else pool.whole.ranks.pids

    def _end_by_force(self, attempt: Attempt) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = rank.now() + 20
        if not attempt.wait(lambda: rank.now() < deadline):
            self.session.registry = Registry()  # goes on without it

    def _judge(self, verdict: Verdict, attempt: Attempt, struck: float | None) -> None:
        fault = self.fault
        for_users = isinstance(attempt.error, ValueError) or _is_own(attempt.error)
        text = attempt.text() or "\n".join(self.session.warnings.texts) or None
        verdict.seconds = None if struck is None or attempt.ended is None else attempt.ended - struck
        verdict.error = text
        if struck is None:
            verdict.problems.append("the fault did not strike")
            return
        expected = ending(fault, self.kind)
        right = self.session.is_right(fault, attempt.value)
        if not right:
            verdict.problems.append("no error, and the result is wrong")
        elif text is None:
            if expected == ERROR:
                verdict.problems.append("no error, and the result is right")
        elif expected == RIGHT:
            verdict.problems.append("an error where the result should have been right")
        elif not re.search(says(fault, self.kind), text, re.DOTALL):
            verdict.problems.append(f"the error does not say {says(fault, self.kind)}")
        elif not for_users:
            verdict.problems.append("the error is none for users")
        late = verdict.seconds is not None and verdict.seconds > self.allowed
        if late and expected != EITHER:
            verdict.problems.append(f"it took {verdict.seconds:.1f} s, where {self.allowed:.1f} s are allowed")

    def _ends(self, attempt: Attempt, seconds: float, verdict: Verdict, what: str) -> bool:
        """Whether something that nothing disturbs ends in time and well."""
        deadline = rank.now() + self.factor * seconds
        if not attempt.wait(lambda: rank.now() < deadline):
            verdict.problems.append(f"{what} has not ended:\n{attempt.where()}")
            self._end_by_force(attempt)
            return False
        if attempt.error is not None:
            verdict.problems.append(f"{what} fails: {attempt.text()}")
            return False
        return True

    def _judge_next(self, verdict: Verdict, after: Attempt, before: tuple[int, ...]) -> None:
        if not self._ends(after, PROMPT, verdict, "the next prompt"):
            return
        if not after.value:
            verdict.problems.append("the next prompt's result is wrong")
        if lives(self.fault, self.kind) and before and self._pids() != before:
            verdict.problems.append("the ranks were started anew")
        left = self.session.left_over(self.fault.degrees, self.factor * SETTLE)
        verdict.problems += [f"left over: {what}" for what in left]


def _is_own(error: BaseException | None) -> bool:
    """A class of the product's, or none at all."""
    return error is None or type(error).__module__.startswith("parallel_backend.")


def try_out(session: FaultSession, fault: Fault, factor: float = 1.0) -> Verdict:
    return Trial(session, fault, factor).run()
