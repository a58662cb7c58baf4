"""Checks of the links between ranks: how fast each is, with P2P and without, and the seconds of a pipeline's hop."""

import statistics
import time
from dataclasses import replace
from typing import Any

from parallel_backend.client.measurements import measured_links
from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.links import SIZES, links_of
from parallel_backend.placement.pipeline_model import HOP_SECONDS
from parallel_backend.processes.pool import Pool
from parallel_backend.rank.comm.process_group import backend_for
from parallel_backend.wire.rank_settings import SELF_TEST

from . import tiny_model
from .findings import Findings
from .session import SelfTestSession

WARM_UP, HOP_CALLS = 2, 10


def look_at_links(session: SelfTestSession, findings: Findings) -> None:
    """Every two ranks send to and fro, then all at once: the transfers that planning times."""
    world = session.several()
    pool = session.ranks(world)
    for note in pool.notes:  # such as P2P switched off: runs work, but their links are slower than they could be
        findings.wrong.append(note)
    findings.note("links", links(pool, session))
    nccl = backend_for(pool.devices) == "nccl" and not pool.self_test.gloo
    findings.note("P2P", pool.self_test.p2p if nccl else None)
    if not nccl:
        findings.leave_out("links without P2P", "only NCCL has both; these ranks talk through Gloo")
    elif pool.self_test.p2p:
        with session.special_ranks(self_test=replace(SELF_TEST, p2p=False)) as pool:
            findings.note("links without P2P", links(pool, session))


def links(pool: Pool, session: SelfTestSession) -> dict[str, Any]:
    """'0-1' -> GB/s and microseconds one way, and how many times slower links are while all send."""
    measured = links_of(measured_links(pool, SIZES, session.poll))
    between = {
        f"{one}-{two}": {"GB_per_s": round(link.bandwidth / 1e9, 3), "us": round(link.latency * 1e6, 1)}
        for (one, two), link in measured.between.items()
    }
    return {"between": between, "crowding": round(measured.crowding, 2)}


def look_at_hop(session: SelfTestSession, findings: Findings) -> None:
    """Milliseconds from the last stage through this process to the first: HOP_SECONDS in planning."""
    degrees = Degrees(pipe=session.several())
    with findings.of(str(degrees)):  # which is left out where there are more ranks than blocks
        model, call, hops = session.load(degrees, "fp32"), tiny_model.on_ranks(*tiny_model.call(batch=1)), []
        for number in range(WARM_UP + HOP_CALLS):
            started = time.perf_counter()
            model.predict(call, session.poll)
            whole = time.perf_counter() - started
            stages = model.close_run(0, session.poll)
            if number >= WARM_UP:  # the last stage counts its wait from the call's beginning, so the rest is the hop
                hops.append(whole - (stages[-1].compute_seconds + stages[-1].wait_seconds))
        findings.note("ms of a hop, median", round(1000 * statistics.median(hops), 3))
        findings.note("ms of a hop, fastest and slowest", [round(1000 * bound, 3) for bound in (min(hops), max(hops))])
        findings.note("ms of a hop that planning expects", 1000 * HOP_SECONDS)
