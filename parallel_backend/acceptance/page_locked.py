"""Checks page-locked memory: how much the driver gives, what happens where it gives no more, and the rates of copies."""

import time

import torch

from parallel_backend.core.device_copies import host_buffer, page_locked
from parallel_backend.core.host_memory import room_for_weights
from parallel_backend.rank.host_memory.page_locks import PageLocks

from .findings import Findings, NotLookedAt
from .session import SelfTestSession

PIECE, MOST = 1 << 27, 1 << 32
"""Bytes that are page-locked at once, as blocks of weights are, and in all."""
COPY, COPIES = 1 << 26, 3
"""Bytes of a timed copy, of which the fastest counts."""


def look_at_page_locked(session: SelfTestSession, findings: Findings) -> None:
    """In this process, on the first device. Drivers tell no limit; under WSL 2 it is 0.5 to 1 GiB of all processes."""
    device = torch.device(session.settings.devices[0])
    if not page_locked(device):
        raise NotLookedAt("the ranks are on CPUs, or this is Windows, where they page-lock nothing")
    session.end_ranks()  # which would have some of it
    most = min(MOST, room_for_weights(device)) // PIECE
    if most < 1:
        raise NotLookedAt("too little host memory is free")
    locks, refused = PageLocks(device), False
    blocks: list[torch.Tensor] = []
    try:
        while not refused and len(blocks) < most:
            blocks.append(torch.empty(PIECE, dtype=torch.uint8))
            locks.add(blocks[-1])
            refused = not blocks[-1].is_pinned()
            session.poll()
        findings.note("GB that the driver page-locks", (len(blocks) - refused) * PIECE / 1e9)
        findings.note("refused more", refused)
        buffer = host_buffer((COPY,), torch.uint8, device)
        findings.expect(buffer.is_pinned(), "prompts and outputs find no page-locked memory where weights have taken theirs")
        there = buffer.fill_(7).to(device, non_blocking=True)
        findings.at_most("bytes that a copy changed", int((there != 7).sum()), 0)
    finally:
        locks.close()
    pageable = torch.empty(COPY, dtype=torch.uint8)
    for name, source, target in (
        ("to the GPU", buffer, there),
        ("to the GPU, not page-locked", pageable, there),
        ("from the GPU", there, buffer),
        ("from the GPU, not page-locked", there, pageable),
    ):
        seconds = _seconds(device, source, target)
        findings.note(f"GB/s {name}", round(COPY / seconds / 1e9, 2))


def _seconds(device: torch.device, source: torch.Tensor, target: torch.Tensor) -> float:
    """Of the fastest of COPIES copies, which the host waits for."""
    seconds = []
    for _ in range(COPIES):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
