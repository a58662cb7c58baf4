"""The same on CPU ranks and on emulated CUDA devices, in threads: equal bit for bit, no violation, and nothing left over."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from parallel_backend.rank import copy_rate
from parallel_backend.rank.attention import ulysses
from parallel_backend.rank.attention.kernels import sdpa
from testing import mini
from testing.fake_cuda import ADA, Card
from testing.thread_ranks import thread_ranks
from tests.campaigns.transport.runner import Pools, same
from tests.support import host_memory
from tests.support.emulated_gpu import emulated
from tests.support.emulated_gpu.host import page_locked
from tests.support.emulated_gpu.machine import Machine
from tests.support.emulated_gpu.nccl import gpu_ranks

WORLDS = (1, 2, 3, 4)
"""Ranks of the pools that have cards of their own: what is allocated on a card is counted for all that have it."""

ENDS_WITHIN = 10.0
"""Seconds that a rank's thread may take to end once its pool is closed."""
Run = Callable[[Callable[..., Any], Callable[[int], Any]], list[torch.Tensor]]
"""`run(load, pool)`: see campaigns.transport.cases.Case. What it gives is on the CPU."""


@dataclass
class Both:
    """Pools of either kind, kept from test to test."""

    cpu: Pools
    gpu: Pools
    machine: Machine

    def check(self, run: Run) -> list[torch.Tensor]:
        """What it gives on the devices. AssertionError unless CPU ranks give the same."""
        try:
            expected = run(self.cpu.load, self.cpu)
        except BaseException:
            self.close()  # the next test has others
            raise
        found = self.on_gpu(run)
        assert same(found, expected), f"relative differences: {list(map(mini.relative, found, expected))}"
        return found

    def on_gpu(self, run: Run) -> list[torch.Tensor]:
        """What it gives on the devices. AssertionError for a violation, and for memory that is left."""
        try:
            self.machine.record.forget()
            found = run(self.gpu.load, self.gpu)
            self.gpu.unload()
            violations = self.machine.record.violations
            assert not violations, "\n".join(violations[:20])
            self.check_memory()
        except BaseException:
            self.close()
            raise
        return found

    def check_memory(self) -> None:
        """Nothing is allocated on any device, and no host memory registered. Threads of ranks may take a while to end."""
        deadline = time.monotonic() + ENDS_WITHIN
        while any(gpu.allocated for gpu in self.machine.gpus):
            gc.unfreeze()  # which rank threads freeze at their start
            gc.collect()
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        assert [gpu.allocated for gpu in self.machine.gpus] == [0] * len(self.machine.gpus)
        assert not page_locked.registered

    def check_less_than(self, nbytes: int) -> None:
        """So much at most is allocated on every device."""
        assert all(gpu.allocated <= nbytes for gpu in self.machine.gpus)

    def close(self) -> None:
        self.cpu.close()
        self.gpu.close()


def devices_of(world: int) -> tuple[str, ...]:
    first = sum(WORLDS[: WORLDS.index(world)])
    return tuple(f"cuda:{first + rank}" for rank in range(world))


@contextlib.contextmanager
def both_kinds(*cards: Card, devices: Callable[[int], tuple[str, ...]] = devices_of, nccl: bool = True) -> Iterator[Both]:
    """`cards`: those of `devices_of`, all alike, if none are given. Without `nccl` ranks talk by the mailbox, as by Gloo."""
    with contextlib.ExitStack() as stack:
        # Heads go in groups under Ulysses on either kind, however little there is to compute.
        stack.enter_context(mock.patch.dict(ulysses.HEAD_GROUPS, cpu=ulysses.HEAD_GROUPS["cuda"]))
        stack.enter_context(mock.patch.object(ulysses, "LEAST_WORK", 0))
        stack.enter_context(mock.patch.object(sdpa, "attend_lse", _padded(sdpa.attend_lse)))
        stack.enter_context(mock.patch.object(copy_rate, "SIZE", 1 << 20))  # a rate is of no concern here
        stack.enter_context(host_memory.plenty())
        cpu = Pools(stack.enter_context(thread_ranks()))
        machine = stack.enter_context(emulated(*cards or [ADA] * sum(WORLDS), checks=False))
        gpu = Pools(stack.enter_context(gpu_ranks() if nccl else thread_ranks()), devices=devices)
        made = Both(cpu, gpu, machine)
        stack.callback(made.close)
        yield made


def _padded(
    attend_lse: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """CUDA's kernel for fp32 and masks pads the log-sum-exp to its tile. What is computed of a part of a row may differ in
    the last bit from what is computed of whole rows, so the CPU's is made a part too."""

    def attend(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale):
        out_BQHD, lse_BQH = attend_lse(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale)
        if not q_BQHD.is_cuda and (mask_BK is not None or q_BQHD.dtype == torch.float32):
            queries = lse_BQH.shape[1]
            lse_BQH = F.pad(lse_BQH.transpose(1, 2), (0, -queries % 32))[..., :queries].transpose(1, 2)
        return out_BQHD, lse_BQH

    return attend
