"""Loading and unloading many times: what ranks keep afterwards."""

import contextlib
import itertools
import statistics
import sys
from pathlib import Path

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool, wait_for
from parallel_backend.quickstart.model import WEIGHTS
from parallel_backend.wire.diagnosis import DeviceMemoryReport, ReadMemory

from . import tiny_flux
from .findings import Findings, NotLookedAt
from .session import SelfTestSession

SETTLED = 4
"""Cycles at the end, and as many before them, whose medians are compared. What libraries keep for good is there by then."""
LARGER = (0.02, 16 << 20)
"""Growth from the one to the other: a share, or bytes where that is more."""


def look_at_lifetime(session: SelfTestSession, findings: Findings) -> None:
    """The tiny model and the bundled one, each called once."""
    cycles = session.settings.cycles
    if cycles < 2 * SETTLED:
        raise NotLookedAt(f"{cycles} cycles are too few to tell growth; {2 * SETTLED} are needed")
    world = session.world
    pool = session.ranks(world)
    held, threads = [], []
    turns = turns_of(world, session.tiny_file)
    for cycle in range(cycles):
        degrees, path = turns[cycle % len(turns)]
        model = session.load(degrees, "fp32", path)
        example = model.family.inputs.example(model.checkpoint.config, 4)
        x, timestep, _ = tiny_flux.inputs(batch=1)
        model.predict(x, timestep, example, session.poll)
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


def turns_of(world: int, tiny_file: Path) -> list[tuple[Degrees, Path]]:
    """What is loaded in turn: modes that make different groups, those of them that each model has."""
    turns = itertools.product((tiny_file, WEIGHTS), (Degrees(ring=world), Degrees(pipe=world)))
    found = []
    for path, degrees in turns:
        with contextlib.suppress(ValueError):  # more stages than blocks
            open_checkpoint(path).check_degrees(degrees)
            found.append((degrees, path))
    return found


def held_bytes(pool: Pool, session: SelfTestSession) -> list[int]:
    """By rank: what is taken of its GPU, by whomever, or its own resident set. NotLookedAt where that is not known."""
    if session.settings.on_gpus:
        answers: list[DeviceMemoryReport] = wait_for(pool.ask(ReadMemory(), DeviceMemoryReport), session.poll)
        return [answer.total_bytes - answer.free_bytes for answer in answers]
    if sys.platform != "linux":
        raise NotLookedAt("what a process has in memory is not known on this system")
    return [1024 * _status(pid, "VmRSS") for pid in pool.pids]


def thread_count(pid: int) -> int:
    """Of a rank of this machine; 0 where that is not known."""
    return _status(pid, "Threads") if sys.platform == "linux" else 0


def _status(pid: int, name: str) -> int:
    words = Path(f"/proc/{pid}/status").read_text().split()
    return int(words[words.index(f"{name}:") + 1])
