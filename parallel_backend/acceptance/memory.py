"""Checks what ranks take of a GPU beside their models: the process itself, and NCCL's connections.

Planning takes it from public figures (placement/gpu_overheads.py), which the ones that are found here stand beside.
"""

import json
from collections import defaultdict
from collections.abc import Sequence

import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.gpu_overheads import COMMUNICATOR, CONNECTION, CONTEXT
from parallel_backend.processes.pool import Pool, wait_for
from parallel_backend.rank.comm.process_group import backend_for
from parallel_backend.wire.diagnosis import DeviceMemoryReport, ReadMemory

from . import tiny_model
from .findings import Findings, NotLookedAt
from .session import SelfTestSession

MB = 1e6


def look_at_memory(session: SelfTestSession, findings: Findings) -> None:
    """Of new ranks, before and after the first call of a ring, whose ranks send to each other. The most of any rank."""
    world, devices = session.several(), session.settings.devices
    if not session.settings.on_gpus:
        raise NotLookedAt("the ranks are on CPUs")
    session.end_ranks()
    before = [_taken(*torch.cuda.mem_get_info(device)) for device in devices]
    session.opened.unlink(missing_ok=True)
    pool = session.ranks(world)
    by_what = opened(session)
    started = _outside(session, pool)

    def note(name: str, found: float, expected: int) -> None:
        findings.note(f"MB of {name}", round(found / MB, 1))
        findings.note(f"MB of {name} that planning expects", expected / MB)

    of_each = [devices.count(device) for device in devices]
    connections = sum(map(sum, by_what.values())) / world
    note("a process", max(_growth(before, started, of_each)) - connections, CONTEXT)
    model = session.load(Degrees(ring=world), "fp32")
    loaded = _outside(session, pool)
    model.predict(tiny_model.on_ranks(*tiny_model.call()), session.poll)
    findings.note("MB that a first call takes", round(max(_growth(loaded, _outside(session, pool), of_each)) / MB, 1))
    if backend_for(devices) != "nccl":
        findings.leave_out("connections", "these ranks talk through Gloo, which takes none of a GPU's memory")
        return
    by_what = opened(session)
    ends = 2 * world  # of communicators so far: the world's and the ring's, on each rank
    sends = sum(by_what["try_pair"]) + sum(by_what["try_all_to_all"])
    sums = sum(by_what["open_communicator"]) + sum(by_what["try_sum"])
    note("a communicator, with its sums", sums / ends, COMMUNICATOR)
    note("sends to and from one other rank", sends / ends / (world - 1), CONNECTION)


def opened(session: SelfTestSession) -> dict[str, list[int]]:
    """What was opened (measured_rank.OPENING) -> the bytes that each such thing has taken, of all ranks."""
    by_what: dict[str, list[int]] = defaultdict(list)
    if session.opened.exists():
        for line in session.opened.read_text(encoding="utf-8").splitlines():
            noted = json.loads(line)
            by_what[noted["what"]].append(noted["bytes"])
    return by_what


def _outside(session: SelfTestSession, pool: Pool) -> list[int]:
    """By rank: bytes of its device that are in use, by any process, but for those that the rank's allocator has."""
    reports: Sequence[DeviceMemoryReport] = wait_for(pool.ask(ReadMemory(), DeviceMemoryReport), session.poll)
    allocators = [report.held_bytes + report.cached_bytes + report.vae_bytes for report in reports]
    places = [report.place for report in reports]
    held = {place: sum(each for each, at in zip(allocators, places, strict=True) if at == place) for place in places}
    return [_taken(report.free_bytes, report.total_bytes) - held[report.place] for report in reports]


def _taken(free: int | None, total: int | None) -> int:
    assert free is not None and total is not None  # as on any GPU
    return total - free


def _growth(before: Sequence[int], after: Sequence[int], shared_by: Sequence[int]) -> list[float]:
    return [(new - old) / ranks for old, new, ranks in zip(before, after, shared_by, strict=True)]
