"""Joins and leaves the process group of all ranks: backend, store and network interface."""

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from parallel_backend.core.devices import device_kind, on_ray

from .rendezvous import StoreFile

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


def join(rank: int, devices: tuple[str, ...], rendezvous: Path | tuple[str, int], timeout: timedelta) -> Callable[[], None]:
    """Join the process group of all ranks: by a store file (see StoreFile) or by a server.

    What comes back is to be called before more groups are made: StoreError if that would not end.
    """
    check: Callable[[], None] = lambda: None  # noqa: E731
    if isinstance(rendezvous, Path):
        check = StoreFile(rendezvous).check
        interface = LOOPBACK.get(sys.platform)
        store = dist.FileStore(str(rendezvous), len(devices))
    else:
        interface = interface_towards(rendezvous)
        store = dist.TCPStore(*rendezvous, len(devices), is_master=False, timeout=timeout)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without "=" it is the name's beginning
    dist.init_process_group(
        backend_for(devices),
        store=store,
        rank=rank,
        world_size=len(devices),
        timeout=timeout,
    )
    check()
    return check


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
    """Destroy the process group. A peer that is already gone makes this fail, and then there is nothing left to leave."""
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
