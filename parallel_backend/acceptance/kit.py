"""All checks in their order, and what came of each."""

import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass

from parallel_backend.processes.pool import Poll

from .faults import look_at_a_hang, look_at_a_killed_rank, look_at_a_stuck_gpu, look_at_memory_running_out
from .findings import Findings, NotLookedAt
from .kernels import look_at_kernels
from .lifetime import look_at_lifetime
from .model_file import look_at_model_file
from .modes import look_at_bands, look_at_modes, look_at_pictures
from .one_rank import look_at_one_rank
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
    """Of one check. `why`: what is wrong, or why it was not looked at. `left_out`: its parts that were not."""

    name: str
    about: str
    status: str
    seconds: float
    why: str
    left_out: tuple[str, ...]
    figures: dict[str, object]


CHECKS: dict[str, tuple[str, Callable[[SelfTestSession, Findings], None]]] = {
    "system": ("driver, libraries, GPUs and how they are connected", look_at_system),
    "kernels": ("attention kernels against fp64, on each device", look_at_kernels),
    "quantised": ("one layer of each quantised format, on each device", look_at_quantised),
    "one rank": ("one rank against diffusers on a CPU; half precision", look_at_one_rank),
    "model file": ("your model on one rank and on all", look_at_model_file),
    "links": ("bandwidth of every link between ranks", look_at_links),
    "modes": ("every mode and product of modes against one rank", look_at_modes),
    "bands": ("PipeFusion and displaced patches repeat bit for bit", look_at_bands),
    "pictures": ("PipeFusion and displaced patches against exact steps", look_at_pictures),
    "hop": ("what a pipeline's hop costs", look_at_hop),
    "lifetime": ("memory after loading and unloading many times", look_at_lifetime),
    "killed rank": ("a rank is killed on purpose: named error, next call works", look_at_a_killed_rank),
    "out of memory": ("a rank is made to run out of memory: named error, next call works", look_at_memory_running_out),
    "hang": ("a rank is made to hang: the watchdog names it", look_at_a_hang),
    "stuck GPU": ("a GPU is made to spin: the watchdog names its rank", look_at_a_stuck_gpu),
}
"""By name: what it is about, in a few words, and the check. One rank comes first, since others compare with it."""


def run(
    settings: Settings,
    host: Host | None = None,
    poll: Poll = lambda: None,
    progress: Progress = lambda done, total, name: None,
    only: Collection[str] | None = None,
) -> list[Result]:
    """Make the checks named in `only` (None: all), on ranks of the self-test's own, which have ended when this returns.

    A check that fails does not end the others. What `poll` raises does, and is raised.
    """
    session = SelfTestSession(settings, host or Host(), poll)
    names = [name for name in CHECKS if only is None or name in only]
    results = []
    try:
        for done, name in enumerate(names):
            progress(done, len(names), name)
            results.append(look(name, session))
        progress(len(names), len(names), "")
    finally:
        session.close()
    return results


def look(name: str, session: SelfTestSession) -> Result:
    """Make one check."""
    about, check = CHECKS[name]
    findings = Findings()
    started = time.perf_counter()
    not_at_all = ""
    try:
        check(session, findings)
    except NotLookedAt as why:
        not_at_all = str(why)
    except Exception as error:
        if session.stopped is not None:
            raise
        findings.wrong.append("".join(traceback.format_exception(error)).strip())
    if not_at_all and not findings.wrong:
        status, why = NOT_LOOKED_AT, not_at_all
    else:
        status, why = (FAILED if findings.wrong else PASSED), "\n".join(findings.wrong)
    seconds = round(time.perf_counter() - started, 2)
    return Result(name, about, status, seconds, why, tuple(findings.left_out), findings.figures)
