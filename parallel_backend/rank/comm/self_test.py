"""The self-test of the links between ranks, on the real transport: each group's first transfer, before weights are read.

Direct access between consumer cards may be reported as working and still hang, or transfer wrong values, where an IOMMU or
PCIe ACS is switched on (nccl-tests #117). So received values are checked, and the first transfer has a shorter time limit.
NCCL makes a group's communicator at its first transfer: here, before weights take the device's memory. torch also forbids a
batch among only some ranks of a group (batch_isend_irecv) as the group's first transfer.
"""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from parallel_backend.wire.rank_settings import P2P_DISABLE

from .mesh import Axis, LinkEnd

VALUES = {"cuda": 1 << 18, "cpu": 1 << 10}
"""float32 values of each transfer, by device. 1 MB is too much for NCCL's protocol for short messages."""
SHARED_MEMORY = Path("/dev/shm")


class LinkError(RuntimeError):
    """A transfer of the self-test failed. `what` and `how` make a sentence; the text ends with advice."""

    def __init__(self, what: str, how: str, backend: str, p2p: bool):
        super().__init__(f"the self-test of the links between ranks failed: {what} {how}. {advice(backend, p2p)}")
        self.backend = backend


def advice(backend: str, p2p: bool) -> str:
    """Advice to the user. `p2p`: NCCL was free to use direct access from GPU to GPU."""
    if backend != "nccl":
        return (
            "Try: a firewall that lets this machine reach itself (or the machines each other); GLOO_SOCKET_IFNAME, set to "
            "the network interface to use."
        )
    direct = f"set {P2P_DISABLE}=1 before ComfyUI starts, or switch IOMMU and PCIe ACS off in the BIOS"
    tried = direct if p2p and P2P_DISABLE not in os.environ else "direct access between GPUs (P2P) was off already"
    return (
        f"Try: {tried}; give {SHARED_MEMORY} at least 1 GB{_shared_memory()}, in a container by --ipc=host or "
        "--shm-size=1g; a newer driver. What NCCL says is in the ranks' logs (NCCL_DEBUG=WARN)."
    )


def try_axis(axis: Axis, device: torch.device) -> None:
    """A sum over the axis, or over the world if it has no group. Collective over it. ValueError if the sum is wrong.

    `device`: a device that the backend transfers from directly.
    """
    values_N = torch.full((VALUES[device.type],), axis.index + 1.0, device=device)
    dist.all_reduce(values_N, group=axis.group)
    _check(values_N, torch.full((len(values_N),), axis.size * (axis.size + 1) / 2))


def try_link(link: LinkEnd, device: torch.device) -> None:
    """A transfer over the link, in the calls of StageLink. Collective over both ends. ValueError for wrong values."""
    pattern_N = torch.arange(VALUES[device.type], dtype=torch.float32)
    sent_or_received_N = pattern_N.to(device) if link.sends else torch.zeros(len(pattern_N), device=device)
    work = (dist.isend if link.sends else dist.irecv)(sent_or_received_N, link.peer, group=link.group)
    assert work is not None
    work.wait()
    if not link.sends:
        _check(sent_or_received_N, pattern_N)
    elif device.type == "cuda":
        torch.cuda.synchronize(device)  # NCCL's wait is one of the stream: the host would not see a send that hangs


def _check(received_N: torch.Tensor, expected_N: torch.Tensor) -> None:
    """On the host, which waits for the device."""
    wrong = int((received_N.cpu() != expected_N).sum())
    if wrong:
        raise ValueError(f"gave {wrong} wrong values of {len(expected_N)}")


def _shared_memory() -> str:
    try:
        return f" (it has {shutil.disk_usage(SHARED_MEMORY).total / 1e9:.2f})"
    except OSError:
        return ""
