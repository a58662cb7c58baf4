"""Checks of a rank that is killed and of a GPU that is stuck: the error, its delay, and that the next call works.

Other faults end in the same way on ranks of any device, which tests show.
"""

import functools
import os
import re
import signal
import time

from parallel_backend.checkpoints.own_class import open_setup
from parallel_backend.client.loading import load_model
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.local import LocalRanks
from parallel_backend.processes.pool import Poll, RankError

from . import faulty_rank, tiny_model
from .findings import Findings, NotLookedAt
from .one_rank import OTHER_KERNELS
from .session import SelfTestSession

ERROR_SECONDS = 5.0
"""The most seconds from a rank's end to the error."""
HANG_MORE = 10.0
"""Seconds above the watchdog's limit: its clock's ticks, and ending ranks that are stuck in a transfer."""
KILL_AFTER = 0.5
"""Seconds of calls before the kill."""
CALLS = 5000
"""The most calls of a run: more than any fault needs."""
FACTOR = 1.0
"""Watchdog.factor: on a slow machine a multiple of its longest block could exceed the limit."""


def look_at_a_killed_rank(session: SelfTestSession, findings: Findings) -> None:
    pool = session.ranks(session.world)
    victim = session.world - 1
    # Windows has no SIGKILL: there os.kill ends a process by any signal.
    kill = _After(KILL_AFTER, lambda: os.kill(pool.pids[victim], getattr(signal, "SIGKILL", signal.SIGTERM)))
    error = _error_of(session, session.load(_degrees(session), "fp32"), kill)
    _expect(findings, error, rf"rank {victim} \([^)]*\) (was killed by signal|ended with exit code) -?\d+")
    if kill.at is not None and error is not None:
        findings.at_most("seconds from the kill to the error", time.monotonic() - kill.at, ERROR_SECONDS)
    _works_again(session, findings)


def look_at_a_stuck_gpu(session: SelfTestSession, findings: Findings) -> None:
    """With a short limit; the product's is a minute, or twenty times the longest block before.

    The rank's host thread runs on, so that the watchdog must watch its device.
    """
    if not session.settings.on_gpus:
        raise NotLookedAt("the ranks are on CPUs")
    limit = session.settings.hang_seconds
    with session.special_ranks(functools.partial(LocalRanks, entry=faulty_rank.main)) as pool:
        pool.watchdog.stall, pool.watchdog.factor = limit, FACTOR
        setup = session.setup(_degrees(session))
        model = load_model(pool, open_setup(setup), setup, session.poll)
        started = time.monotonic()
        error = _error_of(session, model)
        findings.at_most("seconds until the error", time.monotonic() - started, limit + HANG_MORE + ERROR_SECONDS)
    _expect(findings, error, rf"rank {session.world - 1} \([^)]*\) came no further for {limit:.0f} s")
    _works_again(session, findings)


class _After:
    """A poll that acts once, `seconds` after its first call. `at`: the action's time.monotonic()."""

    def __init__(self, seconds: float, action: Poll):
        self.seconds, self.action = seconds, action
        self.at: float | None = None
        self._first: float | None = None

    def __call__(self) -> None:
        now = time.monotonic()
        self._first = self._first or now
        if self.at is None and now > self._first + self.seconds:
            self.at = now
            self.action()


def _degrees(session: SelfTestSession) -> Degrees:
    """A mode whose ranks wait for each other in the middle of each block."""
    return Degrees(ring=session.world)


def _error_of(session: SelfTestSession, model: RemoteTransformer, act: Poll = lambda: None) -> str | None:
    """The RankError that ends a run of CALLS calls; None if no call fails.

    `act` runs between calls too, as a call may end before its first poll.
    """

    def poll() -> None:
        session.poll()
        act()

    call = tiny_model.on_ranks(*tiny_model.call())
    try:
        for _ in range(CALLS):
            poll()
            model.predict(call, poll)
    except RankError as error:
        return str(error)
    return None


def _expect(findings: Findings, error: str | None, form: str) -> None:
    """Note the error's first line, and whether it matches the regular expression `form`."""
    line = None if error is None else error.partition("\n")[0]
    findings.note("error", line)
    findings.expect(
        line is not None and re.search(form, line) is not None, f"the error is {line!r}, not of the form {form!r}"
    )


def _works_again(session: SelfTestSession, findings: Findings) -> None:
    """New ranks, and a call that equals the class's on the CPU."""
    output = session.load(_degrees(session), "fp32").predict(tiny_model.on_ranks(*tiny_model.call()), session.poll)
    expected = tiny_model.reference(session.tiny_model, *tiny_model.call())
    findings.at_most("the next call, from the class on a CPU", tiny_model.relative(output, expected), OTHER_KERNELS)
