"""Checks that loading and unloading many times leaves no memory behind, and that a stuck GPU is noticed."""

import functools
import re
import statistics
import time

from parallel_backend.checkpoints.checkpoint import open_setup
from parallel_backend.client.loading import load_model
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.local import LocalRanks
from parallel_backend.processes.pool import Pool, RankError, wait_for
from parallel_backend.wire.diagnosis import DeviceMemoryReport, ReadMemory

from . import faulty_rank, tiny_model
from .modes import OTHER_KERNELS
from .session import Findings, NotLookedAt, SelfTestSession

SETTLED = 4
"""The last cycles, whose median is compared with that of as many before them. Libraries allocate in the cycles before."""
LARGER = (0.02, 16 << 20)
"""Growth that is allowed: a share, or bytes where that is more."""
LATE = 15.0
"""Seconds from the watchdog's limit to the error: its clock's ticks, and ending ranks that are stuck in a transfer."""
CALLS = 5000
"""Maximum number of calls until the GPU is stuck."""
FACTOR = 1.0
"""Watchdog.factor: on a slow machine a multiple of its longest block could exceed the limit."""


def look_at_lifetime(session: SelfTestSession, findings: Findings) -> None:
    """Each cycle loads the tiny model in one mode or another, calls it once and unloads it."""
    if not session.settings.on_gpus:
        raise NotLookedAt("the ranks are on CPUs")
    pool, held = session.ranks(session.world), []
    modes = Degrees(ring=session.world), Degrees(patch=session.world, patch_mode="displaced")  # with groups of their own
    for cycle in range(session.settings.cycles):
        model = session.load(modes[cycle % len(modes)], "fp32")
        model.predict(tiny_model.on_ranks(*tiny_model.call()), session.poll)
        session.unload()
        held.append(held_bytes(pool, session))
    findings.note("MB by cycle and rank", [[round(each / 1e6, 1) for each in ranks] for ranks in held])
    for rank, sizes in enumerate(zip(*held, strict=True)):
        before, after = statistics.median(sizes[-2 * SETTLED : -SETTLED]), statistics.median(sizes[-SETTLED:])
        share, least = LARGER
        findings.at_most(f"bytes that rank {rank} has more after all cycles", after - before, max(least, share * before))


def held_bytes(pool: Pool, session: SelfTestSession) -> list[int]:
    """Bytes in use on each rank's GPU, by any process."""
    reports = wait_for(pool.ask(ReadMemory(), DeviceMemoryReport), session.poll)
    return [(report.total_bytes or 0) - (report.free_bytes or 0) for report in reports]


def look_at_a_stuck_gpu(session: SelfTestSession, findings: Findings) -> None:
    """The error, its delay, and that the next call works. With a short limit; the product's is a minute, or twenty times
    the longest block before.

    The rank's host thread runs on, so that the watchdog must watch its device.
    """
    if not session.settings.on_gpus:
        raise NotLookedAt("the ranks are on CPUs")
    # The ranks wait for each other in the middle of each block.
    degrees, limit, last = Degrees(ring=session.world), session.settings.hang_seconds, session.world - 1
    with session.special_ranks(functools.partial(LocalRanks, entry=faulty_rank.main)) as pool:
        pool.watchdog.stall, pool.watchdog.factor = limit, FACTOR
        setup = session.setup(degrees)
        model = load_model(pool, open_setup(setup), setup, session.poll)
        started = time.monotonic()
        error = error_of(session, model)
        findings.at_most("seconds until the error", time.monotonic() - started, limit + LATE)
    findings.note("error", error)
    form = rf"rank {last} \([^)]*\) came no further for {limit:.0f} s"
    findings.expect(re.search(form, error) is not None, f"the error is {error!r}, not of the form {form!r}")
    output = session.load(degrees, "fp32").predict(tiny_model.on_ranks(*tiny_model.call()), session.poll)
    expected = tiny_model.reference(session.tiny_model, *tiny_model.call())
    findings.at_most("the next call, from the class on a CPU", tiny_model.relative(output, expected), OTHER_KERNELS)


def error_of(session: SelfTestSession, model: RemoteTransformer) -> str:
    """The first line of the RankError that ends a run of CALLS calls. Empty: no call fails."""
    call = tiny_model.on_ranks(*tiny_model.call())
    try:
        for _ in range(CALLS):
            session.poll()
            model.predict(call, session.poll)
    except RankError as error:
        return str(error).partition("\n")[0]
    return ""
