"""Measures the links between ranks: each pair of ranks sends messages back and forth while the others wait."""

import platform
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from parallel_backend.core.devices import in_its_process
from parallel_backend.wire.messages import LinksProbed

from .staging import from_staging, receivable, sendable

WARM_UP, ROUND_TRIPS = 2, 5


def probe_links(rank: int, devices: tuple[str, ...], sizes: tuple[int, ...]) -> LinksProbed:
    """Return this rank's measurements. Collective over all ranks; no model may be loaded. Tensors are on the ranks' devices.
    Under Gloo, those on a CUDA device go through host memory, as in a run."""
    device = torch.device(in_its_process(devices[rank]))
    links: dict[int, tuple[tuple[int, float], ...]] = {}
    for one in range(len(devices)):
        for two in range(one + 1, len(devices)):
            if rank in (one, two):
                times = tuple(_to_and_fro(size, two if rank == one else one, rank == one, device) for size in sizes)
                if rank == one:
                    links[two] = times
            dist.barrier(device_ids=[device.index] if dist.get_backend() == "nccl" else None)
    free, total, name = None, None, f"CPU ({platform.machine()})"
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
    together = _all_at_once(max(sizes), rank, len(devices), device)
    return LinksProbed(rank, name, free, total, links, together)


def _to_and_fro(size: int, peer: int, first: bool, device: torch.device) -> tuple[int, float]:
    """Return (bytes, seconds in one direction): half of the fastest round trip of `size` bytes to rank `peer`. `first`: this
    rank begins."""
    sent_Y = torch.zeros(size, dtype=torch.uint8, device=device)
    received_Y = receivable(sent_Y.shape, sent_Y, None)

    def round_trip() -> None:
        for sending in (first, not first):
            if sending:
                _transfer(dist.isend, sendable(sent_Y, None), peer)
            else:
                _transfer(dist.irecv, received_Y, peer)
                from_staging(received_Y, device)

    return size, _fastest(round_trip, device) / 2


def _transfer(operation: Callable[..., dist.Work | None], tensor: torch.Tensor, peer: int) -> None:
    # As a batch of one, since that uses the world's communicator. For a single send or receive NCCL would make a new one for
    # the pair and keep it.
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
        work.wait()


def _all_at_once(size: int, rank: int, world: int, device: torch.device) -> float:
    """Return the seconds of the fastest exchange in which every rank sends `size` bytes to every other rank."""
    if world == 1:
        return 0.0
    others = [other for other in range(world) if other != rank]
    sent_Y = torch.zeros(len(others) * size, dtype=torch.uint8, device=device)
    received_Y = receivable(sent_Y.shape, sent_Y, None)

    def exchange() -> None:
        source = sendable(sent_Y, None)
        # Receives first, for both directions of a link at once: see collectives.start_swap.
        operations = [
            dist.P2POp(dist.irecv, part, other) for other, part in zip(others, received_Y.split(size), strict=True)
        ]
        operations += [dist.P2POp(dist.isend, part, other) for other, part in zip(others, source.split(size), strict=True)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        from_staging(received_Y, device)

    return _fastest(exchange, device)


def _fastest(exchange: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of the fastest of ROUND_TRIPS calls, after WARM_UP calls that do not count."""
    seconds = []
    for _ in range(WARM_UP + ROUND_TRIPS):
        started = _now(device)
        exchange()
        seconds.append(_now(device) - started)
    return min(seconds[WARM_UP:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
