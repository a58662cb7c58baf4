"""The self-test of the links between ranks, on the real transport: each group's first transfer, before weights are read.

Direct access between consumer cards may be reported as working and hang, or hand on wrong values, where an IOMMU or PCIe
ACS is switched on (nccl-tests #117). So what arrives is looked at, and the first transfer has a limit of its own. It also
makes each communicator, which NCCL does at its first transfer: its memory is taken before the weights', and no later
transfer among some of its ranks is its first, which torch does not allow (batch_isend_irecv).
"""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from parallel_backend.wire.rank_settings import P2P_DISABLE

from .mesh import Axis, LinkEnd
from .staging import transfer_device

VALUES = {"cuda": 1 << 18, "cpu": 1 << 10}
"""float32 values of each transfer, by device. 1 MB is more than NCCL sends by its protocol for short messages."""
SHARED_MEMORY = Path("/dev/shm")


class LinkError(RuntimeError):
    """The self-test failed: `what` of it, and `how`, follow each other in a sentence. The text says what to try."""

    def __init__(self, what: str, how: str, backend: str, p2p: bool):
        super().__init__(f"the self-test of the links between ranks failed: {what} {how}. {advice(backend, p2p)}")
        self.backend = backend


def advice(backend: str, p2p: bool) -> str:
    """What the user may try. `p2p`: whether these ranks left it to NCCL to use direct access from GPU to GPU."""
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
    """A sum over the axis (the world, where it has no group). Collective over it. ValueError if the sum is wrong."""
    at = transfer_device(device, axis.group)
    values = torch.full((VALUES[device.type],), axis.index + 1.0, device=at)
    dist.all_reduce(values, group=axis.group)
    _check(values, torch.full((len(values),), axis.size * (axis.size + 1) / 2))


def try_link(link: LinkEnd, device: torch.device) -> None:
    """A transfer over the link, the way it is used. Collective over its ends. ValueError if something else arrives."""
    pattern, at = torch.arange(VALUES[device.type], dtype=torch.float32), transfer_device(device, link.group)
    if link.sends:
        dist.isend(pattern.to(at), link.peer, group=link.group).wait()
        if at.type == "cuda":
            torch.cuda.synchronize(at)
    else:
        received = torch.zeros(len(pattern), device=at)
        dist.irecv(received, link.peer, group=link.group).wait()
        _check(received, pattern)


def _check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """On the host, which waits for the device."""
    wrong = int((found.cpu() != expected).sum())
    if wrong:
        raise ValueError(f"gave {wrong} wrong values of {len(expected)}")


def _shared_memory() -> str:
    try:
        return f" (it has {shutil.disk_usage(SHARED_MEMORY).total / 1e9:.2f})"
    except OSError:
        return ""
