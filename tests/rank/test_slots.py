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


def test_a_stage_whose_last_block_is_not_left_copies_the_first_ones_at_the_next_micro_step():
    """The last block of a stage ends by an exception (LaterStages), so that no hook runs behind it."""
    runner = Runner("abcde")
    leave = runner.slots.leave
    runner.slots.leave = lambda name: None if name == "e" else leave(name)
    runner.step("abcde")
    assert [runner.step("abcde") for _ in range(2)] == [(5, 0)] * 2
