"""Blocks that are page-locked where the driver gives less than all of them need, as under WSL 2."""

from collections.abc import Iterator

import pytest
import torch

from parallel_backend.core import pinned
from parallel_backend.rank.host_memory import page_locks
from parallel_backend.rank.host_memory.page_locks import PageLocks
from testing import fake_cuda

CUDA = torch.device("cuda", 1)
MB = 1 << 20


@pytest.fixture
def cuda(monkeypatch) -> Iterator[fake_cuda.FakeCuda]:
    """Its driver page-locks 8 MB in all; blocks leave 2 MB of them."""
    monkeypatch.setattr(page_locks, "RESERVE", 2 * MB)
    monkeypatch.setattr(pinned, "_forget_error", lambda device: None)  # it launches a kernel
    with fake_cuda.fake_cuda(fake_cuda.ADA, fake_cuda.ADA) as cuda:
        cuda.runtime.budget = 8 * MB
        yield cuda


def blocks(count: int, nbytes: int) -> list[torch.Tensor]:
    return [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)]


def test_a_model_that_the_driver_refuses_leaves_page_locked_memory_to_small_copies(cuda, caplog):
    """It asks once, keeps its first blocks, and the receiving thread's segments still find some."""
    locks, weights = PageLocks(CUDA), blocks(20, MB)
    for block in weights:
        locks.add(block)
    assert [cuda.runtime.holds(block) for block in weights] == [True] * 6 + [False] * 14
    assert cuda.runtime.refused == 1
    assert "0.01 GB of the model's blocks are page-locked, the rest is copied more slowly" in caplog.text
    segment = torch.empty(2 * MB, dtype=torch.uint8)
    let_go = pinned.pin(segment, CUDA)
    assert cuda.runtime.holds(segment)
    let_go()
    locks.close()
    assert not cuda.runtime.locked


def test_a_block_is_page_locked_once_and_not_while_another_is_copied(cuda):
    """What the device still reads stays locked until it has read it."""
    locks, (large, other) = PageLocks(CUDA), blocks(2, 5 * MB)
    locks.add(large)
    locks.add(large)
    assert cuda.runtime.devices == [1]
    assert cuda.current_device() == 0  # the thread's own, as before
    cuda.issue(1.0, device=1)
    locks.add(other)  # refused, so the first goes too
    assert not cuda.runtime.locked
    assert cuda.done[1] == 1.0
