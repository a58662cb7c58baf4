"""How fast the links between ranks are: every two of them send to and fro while the others wait."""

import platform
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from parallel_backend.core.devices import in_its_process
from parallel_backend.wire.messages import LinksProbed

from .staging import from_staging, host_buffer, staged, to_staging

WARM_UP, ROUND_TRIPS = 2, 5


def probe_links(rank: int, devices: tuple[str, ...], sizes: tuple[int, ...]) -> LinksProbed:
    """What this rank found out, see LinksProbed. Collective over all ranks; no model may be loaded.

    Tensors lie where the model's would: under Gloo those of a CUDA device go through host memory, as they do at work.
    """
    device = torch.device(in_its_process(devices[rank]))
    links: dict[int, tuple[tuple[int, float], ...]] = {}
    for one in range(len(devices)):
        for two in range(one + 1, len(devices)):
            if rank in (one, two):
                found = tuple(_to_and_fro(size, two if rank == one else one, rank == one, device) for size in sizes)
                if rank == one:
                    links[two] = found
            dist.barrier(device_ids=[device.index] if dist.get_backend() == "nccl" else None)
    peers, free, total, name = {}, None, None, f"CPU ({platform.machine()})"
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        sees_others = torch.cuda.device_count() > 1
        peers = {
            other: torch.cuda.can_device_access_peer(device, theirs)
            for other, theirs in enumerate(devices)
            if theirs.startswith("cuda") and theirs != devices[rank] and sees_others
        }
    together = _all_at_once(max(sizes), rank, len(devices), device)
    return LinksProbed(rank, name, free, total, links, peers, together)


def _to_and_fro(size: int, peer: int, first: bool, device: torch.device) -> tuple[int, float]:
    """(bytes, seconds one way): half the fastest round trip of a tensor of `size` bytes."""
    ours = torch.zeros(size, dtype=torch.uint8, device=device)
    on_host = staged(ours, None)
    best = float("inf")
    for trip in range(WARM_UP + ROUND_TRIPS):
        started = _now(device)
        for sending in (first, not first):
            if sending:
                _transfer(dist.isend, to_staging(ours) if on_host else ours, peer)
            elif on_host:
                theirs = host_buffer(ours.shape, ours.dtype, device)
                _transfer(dist.irecv, theirs, peer)
                ours = from_staging(theirs, device)
            else:
                _transfer(dist.irecv, ours, peer)
        seconds = _now(device) - started
        if trip >= WARM_UP:
            best = min(best, seconds)
    return size, best / 2


def _transfer(operation: Callable[..., dist.Work], tensor: torch.Tensor, peer: int) -> None:
    """As a batch of one: it goes by the world's communicator, where NCCL would make another for every pair and keep it."""
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
        work.wait()


def _all_at_once(size: int, rank: int, world: int, device: torch.device) -> float:
    """Seconds of the fastest exchange in which every rank sends `size` bytes to every other one."""
    if world == 1:
        return 0.0
    others = [other for other in range(world) if other != rank]
    ours = torch.zeros(len(others) * size, dtype=torch.uint8, device=device)
    theirs = torch.empty_like(ours)
    on_host = staged(ours, None)
    best = float("inf")
    for trip in range(WARM_UP + ROUND_TRIPS):
        started = _now(device)
        source = to_staging(ours) if on_host else ours
        target = host_buffer(ours.shape, ours.dtype, device) if on_host else theirs
        # Receives first, as in collectives.py.
        operations = [dist.P2POp(dist.irecv, part, other) for other, part in zip(others, target.split(size), strict=True)]
        operations += [dist.P2POp(dist.isend, part, other) for other, part in zip(others, source.split(size), strict=True)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if on_host:
            theirs = from_staging(target, device)
        seconds = _now(device) - started
        if trip >= WARM_UP:
            best = min(best, seconds)
    return best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
