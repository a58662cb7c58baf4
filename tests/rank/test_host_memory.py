"""Host memory of ranks: one copy for all that hold the same blocks, each block read once, and the file where there is no
room. Ranks are threads."""

import contextlib
import os
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.rank.host_memory import host_store
from parallel_backend.rank.host_memory.host_store import HostStore

CPU = torch.device("cpu")
SIZES = {f"block {index}": 1000 + 70_000 * (index % 3) for index in range(9)}
shares = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="ranks of this system share no memory")


class Together:
    """What ranks in threads have in the place of Peers."""

    def __init__(self, ranks: int):
        self.barrier, self.told = threading.Barrier(ranks), {}

    def of(self, rank: int) -> SimpleNamespace:
        def tell_all(numbers):
            self.told[rank] = list(numbers)
            self.barrier.wait(10)
            return [self.told[other] for other in range(self.barrier.parties)]

        return SimpleNamespace(tell_all=tell_all, blocked=contextlib.nullcontext)


class Blocks:
    """Stands for a checkpoint: every block has bytes of its own, and it is counted how often each is read."""

    def __init__(self):
        self.reads, self.changed, self.changing = Counter(), False, False

    def read(self, name: str, into: torch.Tensor) -> None:
        self.reads[name] += 1
        self.changed |= self.changing
        into.copy_(self.bytes(name))

    def bytes(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(name.split()[1]))
        return torch.randint(0, 256, (SIZES[name],), dtype=torch.uint8, generator=generator)

    def check_unchanged(self) -> None:
        if self.changed:
            raise ValueError("model_name: it has changed")


def on_ranks(degrees: Degrees, use, blocks: Blocks | None = None) -> list:
    """What `use(store, rank)` gives on each rank, at the same time."""
    together, blocks, found = Together(degrees.world), blocks or Blocks(), {}
    done = threading.Barrier(degrees.world)

    def run(rank: int) -> None:
        store = HostStore(rank, CPU, degrees, blocks, together.of(rank))
        try:
            store.allot(SIZES, blocks.read)
            found[rank] = use(store, rank)
            done.wait(10)  # what a rank has made, others look at
            store.close()
        except BaseException as error:
            found[rank] = error
            done.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(degrees.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for error in found.values():
        if isinstance(error, BaseException) and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [found[rank] for rank in range(degrees.world)]


@shares
def test_ranks_with_the_same_weights_read_each_block_once_between_them():
    """And those of another stage have their own."""
    blocks = Blocks()

    def use(store: HostStore, rank: int) -> int:
        store.fill(SIZES)
        assert all(torch.equal(store.source(name), blocks.bytes(name)) for name in SIZES)
        return store.nbytes

    held = on_ranks(Degrees(batch=2, pipe=2, ulysses=2), use, blocks)
    assert blocks.reads == dict.fromkeys(SIZES, 2)  # once in each stage
    assert [sum(held[rank] for rank in stage) for stage in ((0, 1, 4, 5), (2, 3, 6, 7))] == [sum(SIZES.values())] * 2


@shares
def test_a_rank_may_write_over_its_own_copy_and_over_no_other():
    blocks, written = Blocks(), threading.Barrier(2)

    def use(store: HostStore, rank: int) -> torch.Tensor:
        store.fill(SIZES)
        if rank == 0:
            store.private("block 4").zero_()
        written.wait(10)
        return store.source("block 4").clone(), store.nbytes

    (own, held), (other, rest) = on_ranks(Degrees(ulysses=2), use, blocks)
    assert not own.any()
    assert torch.equal(other, blocks.bytes("block 4"))
    assert held + rest == sum(SIZES.values()) + SIZES["block 4"]


def test_without_room_a_block_is_read_anew_from_a_file_that_is_unchanged(monkeypatch, caplog):
    """Neither before the read nor while it is read."""
    blocks, room = Blocks(), [SIZES["block 1"]]
    monkeypatch.setattr(host_store, "room_for_weights", lambda device: room[0])

    def use(store: HostStore, rank: int) -> None:
        store.fill(["block 0", "block 1", "block 2"])
        assert [store.holds(name) for name in ("block 0", "block 1", "block 2")] == [True, True, False]
        for _ in range(2):
            assert torch.equal(store.source("block 2"), blocks.bytes("block 2"))
        assert blocks.reads["block 2"] == 2
        blocks.changed = True
        with pytest.raises(ValueError, match="has changed"):
            store.source("block 2")
        assert torch.equal(store.source("block 1"), blocks.bytes("block 1"))
        blocks.changed, blocks.changing = False, True
        with pytest.raises(ValueError, match="has changed"):
            store.source("block 2")
        blocks.changed, blocks.changing, room[0] = False, False, 1 << 40
        store.source("block 2")
        assert store.holds("block 2")

    on_ranks(Degrees(), use, blocks)
    assert caplog.text.count("host memory is short") == 1


@shares
def test_memory_that_the_system_refuses_is_no_end(monkeypatch):
    """Though it was free a moment before."""
    blocks = Blocks()

    def refuse(handle, start, length):
        raise OSError(12, "Cannot allocate memory")

    def use(store: HostStore, rank: int) -> None:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        assert torch.equal(store.source("block 1"), blocks.bytes("block 1"))
        assert not store.holds("block 1")
        monkeypatch.undo()
        store.fill(["block 1"])
        assert store.holds("block 1")

    on_ranks(Degrees(), use, blocks)
