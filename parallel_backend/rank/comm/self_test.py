"""Tests the links between ranks with every kind of transfer that a run uses, before weights are read.

Direct access between consumer GPUs may be reported as working, and still hang or transfer wrong values. This happens if an
IOMMU or PCIe ACS is switched on (nccl-tests #117). So received values are checked, and the first transfer has a shorter time
limit.

NCCL creates a group's communicator at the group's first transfer, connects two ranks at their first send (nccl
src/enqueue.cc), and connects for a sum once it takes an algorithm, which depends on the size. Each connection takes device
memory, and /dev/shm without direct access. So each kind of transfer between each pair comes first here, before weights need
the memory. torch also forbids a batch among only some ranks of a group (batch_isend_irecv) as the group's first transfer.
"""

import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from parallel_backend.wire.rank_settings import P2P_DISABLE

from .mesh import Axis, LinkEnd

VALUES = {"cuda": 1 << 18, "cpu": 1 << 10}
"""Device -> number of int32 values from each rank to each. 1 MB is too large for NCCL's protocol for short messages."""
SHORT_SUMS = {"cuda": (1 << 4, 1 << 10), "cpu": (1 << 4,)}
"""Device -> float32 values of the sums that the world's group computes: counters and barriers."""
SUMS = {"cuda": (1 << 4, 1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24), "cpu": (1 << 4, 1 << 11)}
"""Device -> float32 values of the sums of tensor parallelism. NCCL changes algorithm and protocol between 64 bytes and 64
MB."""
SHARED_MEMORY = Path("/dev/shm")


class LinkError(RuntimeError):
    """A transfer of the self-test failed. `what` and `how` make a sentence. The message ends with advice."""

    def __init__(self, what: str, how: str, backend: str):
        super().__init__(f"the self-test of the links between ranks failed: {what} {how}. {advice(backend)}")
        self.backend = backend


def advice(backend: str) -> str:
    """Return advice to the user."""
    if backend != "nccl":
        return (
            "Try: a firewall that lets this machine reach itself (or the machines each other); GLOO_SOCKET_IFNAME, set to "
            "the network interface to use."
        )
    direct = f"set {P2P_DISABLE}=1 before ComfyUI starts, or switch IOMMU and PCIe ACS off in the BIOS"
    tried = direct if P2P_DISABLE not in os.environ else "direct access between GPUs (P2P) was off already"
    return (
        f"Try: {tried}; give {SHARED_MEMORY} at least 1 GB{_shared_memory()}, in a container by --ipc=host or "
        "--shm-size=1g; a newer driver; other GPUs in `devices`. The ranks' logs have NCCL's own messages "
        "(NCCL_DEBUG=WARN)."
    )


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of the indices 0 to size - 1, in rounds. An index is in at most one pair of a round."""
    pairs = list(itertools.combinations(range(size), 2))
    by_sum = ([pair for pair in pairs if sum(pair) % size == number] for number in range(size))
    return [together for together in by_sum if together]


def open_communicator(axis: Axis, device: torch.device) -> None:
    """Have every rank send only to itself. That needs the group's communicator but no connection, so that a broken link
    shows in `try_pair`, which names it.

    Collective over the axis, or over the world if it has no group. Raises ValueError for wrong values. `device`, here and
    below: a device from which the backend transfers directly.
    """
    _turn(axis, [axis.index], device)


def try_pair(axis: Axis, other: int, device: torch.device) -> None:
    """Send to the rank with index `other` on the axis and receive from it, by the calls of gathers, shifts and halos.
    Collective over the two. Raises ValueError for wrong values."""
    here, there, values = axis.ranks[axis.index], axis.ranks[other], VALUES[device.type]
    sent_N = _pattern(here, there, values).to(device)
    received_N = torch.zeros_like(sent_N)
    operations = [dist.P2POp(dist.irecv, received_N, there, axis.group), dist.P2POp(dist.isend, sent_N, there, axis.group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    _check(received_N, _pattern(there, here, values), there)


def try_all_to_all(axis: Axis, device: torch.device) -> None:
    """Have every rank send to every rank at once. Collective over the axis. Raises ValueError with the sender of wrong
    values."""
    _turn(axis, range(axis.size), device)


def try_sum(axis: Axis, values: int, device: torch.device) -> None:
    """Sum `values` float32 values over the axis. Collective over it. Raises ValueError if the sum is wrong."""
    values_N = torch.full((values,), axis.index + 1.0, device=device)
    dist.all_reduce(values_N, group=axis.group)
    _check(values_N, torch.full((values,), axis.size * (axis.size + 1) / 2))


def try_link(link: LinkEnd, device: torch.device) -> None:
    """Send over the link by the calls of StageLink. Collective over both ends. Raises ValueError for wrong values."""
    pattern_N = torch.arange(VALUES[device.type], dtype=torch.int32)
    sent_or_received_N = pattern_N.to(device) if link.sends else torch.zeros_like(pattern_N, device=device)
    work = (dist.isend if link.sends else dist.irecv)(sent_or_received_N, link.peer, group=link.group)
    assert work is not None
    work.wait()
    if not link.sends:
        _check(sent_or_received_N, pattern_N)
    elif device.type == "cuda":
        torch.cuda.synchronize(device)  # NCCL's wait is one of the stream: the host would not see a send that hangs


def _turn(axis: Axis, others: Sequence[int], device: torch.device) -> None:
    """An all-to-all in which each rank sends to, and receives from, only these indices of the axis."""
    values, here = VALUES[device.type], axis.ranks[axis.index]
    splits = [values if index in others else 0 for index in range(axis.size)]
    sent_N = torch.cat([_pattern(here, axis.ranks[index], values) for index in others]).to(device)
    received_N = torch.zeros_like(sent_N)
    dist.all_to_all_single(received_N, sent_N, splits, splits, group=axis.group)
    for index, part_N in zip(others, received_N.split(values), strict=True):
        _check(part_N, _pattern(axis.ranks[index], here, values), axis.ranks[index])


def _pattern(sender: int, receiver: int, values: int) -> torch.Tensor:
    """[values] int32 for one direction of a pair. Patterns of different pairs differ at every position, and none has a
    zero."""
    return torch.arange(1, values + 1, dtype=torch.int32) + (sender << 12) + receiver


def _check(received_N: torch.Tensor, expected_N: torch.Tensor, sender: int | None = None) -> None:
    """Compare values on the host, which waits for the device. `sender`: the rank that sent them, if it is only one."""
    wrong = int((received_N.cpu() != expected_N).sum())
    if wrong:
        of = "" if sender is None else f" from rank {sender}"
        raise ValueError(f"gave {wrong} wrong values of {len(expected_N)}{of}")


def _shared_memory() -> str:
    try:
        return f" (it has {shutil.disk_usage(SHARED_MEMORY).total / 1e9:.2f})"
    except OSError:
        return ""
