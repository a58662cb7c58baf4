"""Checks that loading and unloading many times leaves ranks with no more memory and threads."""

import contextlib
import statistics
import sys
from pathlib import Path

from parallel_backend.checkpoints.own_class import open_setup
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool, wait_for
from parallel_backend.wire.diagnosis import DeviceMemoryReport, ReadMemory

from . import tiny_model
from .findings import Findings, NotLookedAt
from .session import SelfTestSession

SETTLED = 4
"""The last cycles, whose median is compared with that of as many before them. Libraries allocate in the cycles before."""
LARGER = (0.02, 16 << 20)
"""Growth that is allowed: a share, or bytes where that is more."""


def look_at_lifetime(session: SelfTestSession, findings: Findings) -> None:
    """Each cycle loads the tiny model in one mode or another, calls it once and unloads it."""
    cycles = session.settings.cycles
    if cycles < 2 * SETTLED:
        raise NotLookedAt(f"{cycles} cycles are too few to tell growth; {2 * SETTLED} are needed")
    world = session.world
    pool = session.ranks(world)
    held, threads = [], []
    turns = turns_of(session)
    for cycle in range(cycles):
        model = session.load(turns[cycle % len(turns)], "fp32")
        model.predict(tiny_model.on_ranks(*tiny_model.call()), session.poll)
        session.unload()
        held.append(held_bytes(pool, session))
        threads.append([thread_count(pid) for pid in pool.pids])
    findings.note("MB by cycle and rank", [[round(each / 1e6, 1) for each in ranks] for ranks in held])
    findings.note("threads by cycle and rank", threads)
    for rank, sizes in enumerate(zip(*held, strict=True)):
        before, after = statistics.median(sizes[-2 * SETTLED : -SETTLED]), statistics.median(sizes[-SETTLED:])
        share, least = LARGER
        findings.at_most(f"bytes that rank {rank} has more after all cycles", after - before, max(least, share * before))
    for rank, counts in enumerate(zip(*threads, strict=True)):
        findings.at_most(f"threads that rank {rank} has more after all cycles", counts[-1] - counts[-SETTLED], 1)


def turns_of(session: SelfTestSession) -> list[Degrees]:
    """The modes to load in turn, which make different process groups, as far as the model allows them."""
    turns = []
    for degrees in (Degrees(ring=session.world), Degrees(pipe=session.world)):
        with contextlib.suppress(ValueError):  # more stages than blocks
            open_setup(session.setup(degrees)).check_degrees(degrees)
            turns.append(degrees)
    return turns


def held_bytes(pool: Pool, session: SelfTestSession) -> list[int]:
    """By rank: bytes in use on its GPU, by any process, or the rank's resident set. NotLookedAt where they are not known."""
    if session.settings.on_gpus:
        reports = wait_for(pool.ask(ReadMemory(), DeviceMemoryReport), session.poll)
        return [(report.total_bytes or 0) - (report.free_bytes or 0) for report in reports]
    if sys.platform != "linux":
        raise NotLookedAt("what a process has in memory is not known on this system")
    return [1024 * _status(pid, "VmRSS") for pid in pool.pids]


def thread_count(pid: int) -> int:
    """Of a rank of this machine; 0 where that is not known."""
    return _status(pid, "Threads") if sys.platform == "linux" else 0


def _status(pid: int, name: str) -> int:
    fields = Path(f"/proc/{pid}/status").read_text().split()
    return int(fields[fields.index(f"{name}:") + 1])
