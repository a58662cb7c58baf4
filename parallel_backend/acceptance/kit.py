"""Runs the checks in their order and collects their results."""

import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from parallel_backend.processes.pool import Poll

from .catalogue import ABOUT
from .faults import look_at_a_killed_rank, look_at_a_stuck_gpu
from .findings import Findings, NotLookedAt
from .graphs import look_at_graphs
from .kernels import look_at_kernels
from .lifetime import look_at_lifetime
from .memory import look_at_memory
from .model_file import look_at_model_file
from .modes import look_at_modes
from .one_rank import look_at_one_rank
from .page_locked import look_at_page_locked
from .quantised import look_at_quantised
from .session import Host, SelfTestSession, Settings
from .system import look_at_system
from .transport import look_at_hop, look_at_links

PASSED, FAILED, NOT_LOOKED_AT = "passed", "failed", "not looked at"
STATUSES = (PASSED, FAILED, NOT_LOOKED_AT)

Progress = Callable[[int, int, str], None]
"""(checks done, of how many, the next one)."""


@dataclass(frozen=True)
class Result:
    """Of one check. `why`: its failures, or why it was not made. `left_out`: parts that were not checked."""

    name: str
    about: str
    status: str
    seconds: float
    why: str
    left_out: tuple[str, ...]
    figures: dict[str, object]


LOOKS: dict[str, Callable[[SelfTestSession, Findings], None]] = {
    "system": look_at_system,
    "kernels": look_at_kernels,
    "quantised": look_at_quantised,
    "page-locked": look_at_page_locked,
    "one rank": look_at_one_rank,
    "graphs": look_at_graphs,
    "model file": look_at_model_file,
    "links": look_at_links,
    "memory": look_at_memory,
    "modes": look_at_modes,
    "hop": look_at_hop,
    "lifetime": look_at_lifetime,
    "killed rank": look_at_a_killed_rank,
    "stuck GPU": look_at_a_stuck_gpu,
}
CHECKS = {name: (about, LOOKS[name]) for name, about in ABOUT.items()}
"""Name -> description and check."""


def run(
    settings: Settings,
    host: Host | None = None,
    poll: Poll = lambda: None,
    progress: Progress = lambda done, total, name: None,
    only: Collection[str] | None = None,
    found: Callable[[Sequence[Result]], None] = lambda results: None,
) -> list[Result]:
    """Make the checks named in `only` (None: all). The self-test starts the ranks, and has ended them when this returns.
    `found` is called with all results so far behind each check.

    Checks go on after a failed one. An exception of `poll` ends them and is raised.
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
    """Make one check."""
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
