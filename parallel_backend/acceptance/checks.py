"""The table of the self-test's checks. Runs them in the table's order and collects their results."""

import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from parallel_backend.processes.pool import Poll

from .kernels import look_at_attention
from .machine import look_at_links, look_at_system
from .modes import look_at_modes
from .own_model import look_at_model
from .session import Findings, Host, NotLookedAt, SelfTestSession, Settings
from .transports import look_at_transports

PASSED, FAILED, NOT_LOOKED_AT = "passed", "failed", "not looked at"
STATUSES = (PASSED, FAILED, NOT_LOOKED_AT)

CHECKS: dict[str, tuple[str, Callable[[SelfTestSession, Findings], None]]] = {
    "system": ("driver, libraries and GPUs", look_at_system),
    "kernels": ("attention kernels, on each device", look_at_attention),
    "links": ("bandwidth of every link between ranks", look_at_links),
    "transports": ("settings of NCCL for direct access between GPUs: the fastest one is kept", look_at_transports),
    "modes": ("one rank against a CPU, and every mode against one rank", look_at_modes),
    "model file": ("your model on one rank and on all", look_at_model),
}
"""Name of a check -> its description and its function."""

Progress = Callable[[int, int, str], None]
"""Called with the number of checks done, the number of all checks, and the name of the next one."""


@dataclass(frozen=True)
class Result:
    """Result of one check. `why`: its failures, or why it was not run. `left_out`: parts that were not checked."""

    name: str
    about: str
    status: str
    seconds: float
    why: str
    left_out: tuple[str, ...]
    figures: dict[str, object]


def run(
    settings: Settings,
    host: Host | None = None,
    poll: Poll = lambda: None,
    progress: Progress = lambda done, total, name: None,
    only: Collection[str] | None = None,
    found: Callable[[Sequence[Result]], None] = lambda results: None,
) -> list[Result]:
    """Run the checks named in `only` (None: all). Ranks are started for them, and have ended when this returns.

    After each check `found` is called with all results so far. Checks continue after a failed one. An exception raised by
    `poll` ends them and is passed on.
    """
    session = SelfTestSession(settings, host or Host(), poll)
    names = [name for name in CHECKS if only is None or name in only]
    results = []
    try:
        for done, name in enumerate(names):
            progress(done, len(names), name)
            results.append(look(name, session))
            found(results)
        progress(len(names), len(names), "")
    finally:
        session.close()
    return results


def look(name: str, session: SelfTestSession) -> Result:
    """Run one check and return its result."""
    about, check = CHECKS[name]
    findings = Findings()
    started = time.perf_counter()
    status, why = PASSED, ""
    try:
        check(session, findings)
    except NotLookedAt as reason:
        status, why = NOT_LOOKED_AT, str(reason)
    except Exception as error:
        if session.stopped is not None:
            raise
        findings.wrong.append("".join(traceback.format_exception(error)).strip())
    if findings.wrong:
        status, why = FAILED, "\n".join(findings.wrong)
    seconds = round(time.perf_counter() - started, 2)
    return Result(name, about, status, seconds, why, tuple(findings.left_out), findings.figures)
