"""Rank threads of the product on hollow devices, and the real client before them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch

from parallel_backend.core import kitchen
from parallel_backend.processes.pool import Pool
from parallel_backend.rank.attention import kernel_choice
from parallel_backend.rank.comm import peers
from parallel_backend.rank.stage.store import device_copies
from parallel_backend.wire.heartbeat import Heartbeat
from testing.thread_ranks import ThreadRanks, thread_ranks

from .account import Account
from .cuda import hollow_cuda
from .distributed import HollowDistributed
from .tensors import Devices

COPY_RATE = 25e9
"""Bytes a second from the host to a device: nothing takes time here, so that it could not be measured."""


@dataclass
class HollowRanks(ThreadRanks):
    """See ThreadRanks. `distributed` is a HollowDistributed."""

    def _run(self, rank: int, connection: Connection) -> None:
        with Devices(self.distributed.accounts):
            super()._run(rank, connection)


def _fused_kernel(name: str, *_: Any) -> kitchen.Fused:
    """comfy-kitchen's operation, which counts as one kernel."""
    import comfy_kitchen  # noqa: F401

    return getattr(torch.ops.comfy_kitchen, name)


@contextlib.contextmanager
def hollow_pool(world: int) -> Iterator[tuple[Pool, tuple[Account, ...]]]:
    """Context with a pool of so many ranks, each on a device of its own, and their accounts."""
    accounts = tuple(Account() for _ in range(world))
    distributed = HollowDistributed(accounts)
    with contextlib.ExitStack() as stack:
        stack.enter_context(hollow_cuda(accounts))
        stack.enter_context(thread_ranks(distributed))
        # What ranks tell each other in numbers has to arrive: it goes through the host.
        stack.enter_context(mock.patch.object(peers, "backend_for", lambda devices: "gloo"))
        # A heartbeat's thread may outlive its rank, and would ask torch.cuda itself.
        stack.enter_context(mock.patch.object(Heartbeat, "mark", lambda *_, **__: None))
        # A kernel's trial compares values, and there are none.
        stack.enter_context(mock.patch.object(kernel_choice, "trial", lambda *_: None))
        stack.enter_context(mock.patch.object(kitchen, "fused_kernel", _fused_kernel))
        stack.enter_context(mock.patch.object(device_copies, "measured_copy_rate", lambda device: COPY_RATE))
        devices = tuple(f"cuda:{index}" for index in range(world))
        start = lambda settings: HollowRanks(distributed, settings)  # noqa: E731
        yield stack.enter_context(contextlib.closing(Pool(devices, threads=1, start=start, silence=3600.0))), accounts
