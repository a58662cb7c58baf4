"""In which order streamed blocks come to their slots."""

from dataclasses import dataclass

import pytest
import torch

from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.rank.stage.store.device_copies import DeviceCopies
from parallel_backend.rank.stage.store.slots import Slots

CPU = torch.device("cpu")
BYTES = 4


@dataclass
class Group:
    """A block whose bytes are all its letter."""

    name: str
    nbytes: int = BYTES
    memory: torch.Tensor | None = None

    def move(self, memory: torch.Tensor) -> None:
        self.memory = memory[: self.nbytes]


class Runner:
    """Micro-steps of blocks of one letter each. `late`: how many had to be fetched when they were about to run."""

    def __init__(self, names: str):
        self.groups = {name: Group(name) for name in names}
        self.slots = Slots(DeviceCopies(CPU), Traffic(CPU))
        self.slots.open(list(self.groups.values()), lambda name: torch.full((BYTES,), ord(name), dtype=torch.uint8))

    def step(self, names: str) -> tuple[int, int]:
        """(blocks copied, `late`)"""
        late = 0
        self.slots.begin_step()
        for name in names:
            before = self.slots.bytes_copied
            self.slots.enter(name)
            late += self.slots.bytes_copied > before
            assert self.groups[name].memory.tolist() == [ord(name)] * BYTES
            self.slots.leave(name)
        return self.slots.report()[0] // BYTES, late


@pytest.mark.parametrize("names", ["abcdef", "abcde"])
def test_each_block_is_copied_once_in_a_micro_step_before_it_runs(names):
    runner = Runner(names)
    runner.step(names)
    assert [runner.step(names) for _ in range(3)] == [(len(names), 0)] * 3


def test_the_order_is_that_of_the_micro_step_before():
    """Lists whose blocks run in between each other's, and some that run for a new prompt alone."""
    runner, order = Runner("abcdxyz"), "axbyczd"
    for first, names, copied in (("zxyabcd", order, 7), (order, "abcd", 4), ("abcd", order, 7)):
        runner.step(first)
        runner.step(names)
        runner.step(names)  # blocks may get other slots, so that neighbours have different ones
        assert [runner.step(names) for _ in range(2)] == [(copied, 0)] * 2
