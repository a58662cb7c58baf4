"""Collects the failures and hangs of ranks, and builds the error that names the rank at fault."""

import copy
import time
from collections.abc import Callable
from typing import TypeVar

from parallel_backend.wire import messages as m

from .failure_text import DEVICE_FULL, DEVICE_LOST, FILE_GONE, asked, died, explained, failed
from .local import Ranks
from .watchdog import Verdict

E = TypeVar("E", bound=BaseException)

ROOT_CAUSE_SECONDS = 3.0
"""Seconds to wait for the root cause after a rank reports a failed transfer, because another rank may have died, which
explains more. On a busy machine the system takes more than a second to end a killed process."""


class RankError(RuntimeError):
    """A rank failed. The message names it, its device and what it was doing; the pool is gone, the next use rebuilds it."""


class LinksDown(RankError):
    """The ranks' self-test of the links between them failed. `backend` is "nccl" or "gloo"."""

    def __init__(self, text: str, backend: str = ""):  # copy.copy calls it with the text alone, then sets `backend`
        super().__init__(text)
        self.backend = backend


class DeviceFull(RankError):
    """A device had too little memory. `rank` ran out of it; `asked` is the size of its failed allocation in bytes (0:
    unknown)."""

    def __init__(self, text: str, rank: int = 0, asked: int = 0):  # see LinksDown
        super().__init__(text)
        self.rank, self.asked = rank, asked


class RankLost(RankError):
    """A rank died, hung, or lost its device. `devices` are the devices of the ranks at fault, or empty if any rank may be at
    fault. `did` is the verb for messages, such as "died"."""

    def __init__(self, text: str, devices: tuple[str, ...] = (), did: str = "failed"):  # see LinksDown
        super().__init__(text)
        self.devices, self.did = devices, did


def again(error: E) -> E:
    """Return a copy of the error for another caller. Raising the same object again would keep the earlier traceback's
    frames."""
    return copy.copy(error)


class FailureReport:
    """Failures of the ranks of one pool, recorded by the pool's receiving thread. `doing` returns a rank's last known work
    as text."""

    def __init__(self, ranks: Ranks, doing: Callable[[int], str]):
        self._ranks, self._doing = ranks, doing
        self._failures: list[m.Failure] = []
        self._cut_off: list[int] = []  # ranks whose connection ended
        self._since: float | None = None

    @property
    def pending(self) -> bool:
        """Whether a rank has failed or ended."""
        return self._since is not None

    def note_failure(self, failure: m.Failure) -> None:
        """Record a failure that a rank has reported."""
        self._failures.append(failure)
        self.note_end()

    def note_cut_off(self, rank: int) -> None:
        """Record that a rank's connection has ended."""
        self._cut_off.append(rank)
        self.note_end()

    def note_end(self) -> None:
        """Record that a rank's process has ended."""
        self._since = self._since or time.monotonic()

    def root_cause(self) -> RankError | None:
        """Return the error that names the rank at fault, or None as long as another rank may still report the cause."""
        assert self._since is not None, "nothing has failed"
        reported = {failure.rank for failure in self._failures}
        ended = {rank: how for rank in range(len(self._ranks.names)) if (how := self._ranks.how_ended(rank)) is not None}
        causes = [failure for failure in self._failures if not failure.peer]
        late = time.monotonic() - self._since > ROOT_CAUSE_SECONDS
        # A rank that has ended may have sent the reason: its connection is first read to the end.
        died_unheard = [rank for rank in ended if rank not in reported and (late or rank in self._cut_off)]
        if causes:
            failure = causes[0]
            error = self._error(failed(self._name(failure.rank), failure.doing, failure.summary), failure.traceback)
            full = DEVICE_FULL.search(failure.summary)
            if full:
                return DeviceFull(str(error), failure.rank, asked(failure.summary))
            lost = DEVICE_LOST.search(failure.summary)
            return RankLost(str(error), (self._ranks.names[failure.rank],), "failed") if lost else error
        if died_unheard:
            return self._died(died_unheard[0], ended[died_unheard[0]])
        if late and any(failure.transport for failure in self._failures):
            return self._links_down([failure for failure in self._failures if failure.transport])
        if late and self._failures:
            failure = self._failures[0]
            return self._error(f"{self._name(failure.rank)} lost its peer: {failure.summary}", failure.traceback)
        return self._died(self._cut_off[0], "closed its connection") if late else None

    def refusal(self, rank: int, why: str) -> RankError:
        """Return the error for a rank that sent an invalid message."""
        text = f"{self._name(rank)} sent an invalid message: {why}. All ranks were ended. The next prompt starts new ones."
        return self._error(text, "", self._ranks.log_tail(rank))

    def cut_short(self, error: BaseException) -> RankError:
        """Return the error for the case that messages reached only some ranks, or only in part, because of `error` in this
        process."""
        text = f"sending to the ranks was interrupted by {type(error).__name__}: {error}"
        return self._error(f"{text}. All ranks were ended. The next prompt starts new ones.", "")

    def hang(self, verdict: Verdict) -> RankError:
        """Return the error for ranks that hang or are stopped, as the watchdog has judged in `verdict`."""
        names = " and ".join(map(self._name, verdict.ranks))
        error = self._error(f"{names} {verdict.text}", "", *map(self._ranks.log_tail, verdict.ranks))
        at_fault = verdict.ranks if len(verdict.ranks) < len(self._ranks.names) else ()
        return RankLost(str(error), tuple(self._ranks.names[rank] for rank in at_fault), "did not answer")

    def _links_down(self, failures: list[m.Failure]) -> LinksDown:
        """Return the error for a failed self-test. It shows every rank's report: each names the rank for which it waited."""
        text = f"{self._name(failures[0].rank)}: {failures[0].summary}"
        others = "\n".join(f"{self._name(failure.rank)}: {failure.summary}" for failure in failures[1:])
        logs = (self._ranks.log_tail(failure.rank) for failure in failures)
        return LinksDown(explained(text, others, [log for log in logs if log], self._ranks.logs), failures[0].transport)

    def _died(self, rank: int, how: str) -> RankError:
        log = self._ranks.log_tail(rank)
        error = self._error(died(self._name(rank), how, self._doing(rank), log), "", log)
        return error if how == FILE_GONE else RankLost(str(error), (self._ranks.names[rank],), "died")

    def _error(self, text: str, traceback: str, *logs: str) -> RankError:
        return RankError(explained(text, traceback, logs, self._ranks.logs))

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._ranks.names[rank]})"
