"""Joins and leaves the process group of all ranks: backend, store and network interface."""

import contextlib
import os
import socket
import sys
from datetime import timedelta

import torch.distributed as dist

from parallel_backend.core.devices import device_kind, on_ray
from parallel_backend.wire.rank_settings import P2P_DISABLE

from .rendezvous import Rendezvous

LOOPBACK = {"linux": "lo", "darwin": "lo0"}
"""Interface name by `sys.platform`. Gloo would otherwise listen on the address that the host name resolves to, NCCL on the
first interface that is not loopback."""


SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address: its name in 16 bytes, and the address at byte 20 of the answer."""


def backend_for(devices: tuple[str, ...]) -> str:
    """NCCL when every rank has a CUDA device of its own and NCCL is built in; Gloo otherwise (CPU, shared GPUs, Windows)."""
    local = [name for name in devices if not on_ray(name)]  # Ray gives each rank a GPU that no other has
    distinct = len(set(local)) == len(local) and all(device_kind(name) == "cuda" for name in devices)
    return "nccl" if distinct and dist.is_nccl_available() else "gloo"


def join(rank: int, devices: tuple[str, ...], rendezvous: Rendezvous, timeout: timedelta, p2p: bool = True) -> None:
    """Join the process group of all ranks, two at least. `timeout`: of its transfers. `p2p`: see rank_settings.SelfTest.

    No device is bound to the group: NCCL's communicators are then made one by one when first used, as self_test.py does.
    Bound, all transfers between two ranks would share one of them and wait for each other (pytorch #154132).
    """
    interface = interface_towards(rendezvous.address) if rendezvous.address else LOOPBACK.get(sys.platform)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without "=" it is the name's beginning
    os.environ.setdefault("NCCL_DEBUG", "WARN")  # goes to standard output, and with it into the rank's log
    if not p2p:
        os.environ[P2P_DISABLE] = "1"
    dist.init_process_group(
        backend_for(devices),
        store=rendezvous.store,
        rank=rank,
        world_size=len(devices),
        timeout=timeout,
    )


def interface_towards(address: tuple[str, int]) -> str | None:
    """The network interface by which this machine reaches an IPv4 address; None where that cannot be asked: not on Linux."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(address)  # sends nothing
        own = socket.inet_aton(asked.getsockname()[0])
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asked, SIOCGIFADDR, name.encode().ljust(40, b"\0"))
            except OSError:  # it has no IPv4 address
                continue
            if found[20:24] == own:
                return name
    return None


def leave() -> None:
    """Destroy the process group, if there is one. If a peer is gone this fails, and there is nothing left to leave."""
    with contextlib.suppress(RuntimeError):
        if dist.is_initialized():
            dist.destroy_process_group()
