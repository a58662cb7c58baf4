"""Joins and leaves the process group of all ranks: backend, store and network interface."""

import contextlib
import os
from datetime import timedelta

import torch.distributed as dist

from parallel_backend.core.devices import device_kind, on_ray
from parallel_backend.wire.rank_settings import BY_NCCL, Transport

from .interfaces import LOOPBACK, check_named, interface_towards, interface_with, loopback_interface
from .rendezvous import Rendezvous

GLOO_INTERFACE, NCCL_INTERFACE = INTERFACE_VARIABLES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables with the interface that each library listens on. A user's setting is kept."""

HIGH_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
"""torch's environment variable (ProcessGroupNCCL.hpp) for is_high_priority_stream in the options of every group."""
NEW_NCCL = "TORCH_DIST_USE_NCCL2"
"""torch's environment variable since 2.15. "0" selects the older class of NCCL groups. See `DEFAULTS`."""
RECORDER, OLD_RECORDER = RECORDER_VARIABLES = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""torch's environment variables: the number of transfers whose Python stacks its flight recorder keeps. In versions that
only know the old name the recorder is off by default."""

DEFAULTS = {
    "NCCL_DEBUG": "WARN",  # goes to standard output, and with it into the rank's log
    # NCCL's streams before those that compute: a transfer's kernel then gets the next free multiprocessors, instead of those
    # that are left by all kernels queued before it. torch reads this when it makes a communicator, and ROCm's does too.
    HIGH_PRIORITY: "1",
    # The class that torch 2.15 makes by itself takes the GPU with the rank's number, not the one in `devices`. It ignores
    # HIGH_PRIORITY, and splits the world's communicator at every new group.
    NEW_NCCL: "0",
    # The recorder gathers a Python stack at each transfer: 7 of 29 microseconds of a short sum on a CPU.
    RECORDER: "0",
}
"""Environment variables of a rank, set before its process group is created. A user's setting is kept."""


def backend_for(devices: tuple[str, ...]) -> str:
    """NCCL if no two ranks share a CUDA device and torch has NCCL. Otherwise Gloo (CPU, shared GPUs, Windows)."""
    local = [name for name in devices if not on_ray(name)]  # Ray gives each rank a GPU that no other has
    distinct = len(set(local)) == len(local) and all(device_kind(name) == "cuda" for name in devices)
    return "nccl" if distinct and dist.is_nccl_available() else "gloo"


def join(
    rank: int,
    devices: tuple[str, ...],
    rendezvous: Rendezvous,
    timeout: timedelta,
    transport: Transport = BY_NCCL,
) -> None:
    """Join the process group of all ranks, at least two. `timeout`: for its transfers."""
    if rendezvous.address:
        interface = interface_towards(rendezvous.address)
    else:
        interface = None if all(name in os.environ for name in INTERFACE_VARIABLES) else loopback_interface()
    if GLOO_INTERFACE in os.environ:
        check_named(GLOO_INTERFACE, os.environ[GLOO_INTERFACE])
    if interface is not None:
        os.environ.setdefault(GLOO_INTERFACE, interface)
        os.environ.setdefault(NCCL_INTERFACE, f"={interface}")  # without "=" it is the name's beginning
    set_defaults()
    os.environ.update(transport.variables)
    # No device_id: bound to a device, all transfers between two ranks would share one communicator and wait for each other
    # (pytorch #154132). Unbound, every group makes its communicator when first used, by self_test.py.
    backend = "gloo" if transport.gloo else backend_for(devices)
    dist.init_process_group(backend, store=rendezvous.store, rank=rank, world_size=len(devices), timeout=timeout)


def set_defaults() -> None:
    """Set DEFAULTS in this process's environment."""
    recorder_set = any(name in os.environ for name in RECORDER_VARIABLES)
    for name, value in DEFAULTS.items():
        if not (name == RECORDER and recorder_set):
            os.environ.setdefault(name, value)


def is_far() -> bool:
    """Whether Gloo's transfers may leave this machine, because its interface is not the loopback one."""
    return os.environ.get(GLOO_INTERFACE, "") not in ("", interface_with(LOOPBACK))


def leave() -> None:
    """Destroy the process group if there is one. Ignores the failure if a peer is gone, because no group is left then."""
    with contextlib.suppress(RuntimeError):
        if dist.is_initialized():
            dist.destroy_process_group()
