"""The slots: memory on the device that streamed blocks use in turn.

Blocks are assigned to slots in turn, in the order in which they run, which is the same in every micro-step. A block always
has the same slot: its parameters stay views of the slot, and only the bytes change. While a block computes in one slot, the
next block's bytes are copied into another. When a block ends, the next block of its slot is copied there. After a
micro-step's last block come the first blocks of the next micro-step. A block that is not there when it runs is waited for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from parallel_backend.core.block_residency import SLOTS
from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.wire.timeline_kinds import FETCH

from .device_copies import DeviceCopies, Ticket
from .weight_group import WeightGroup


@dataclass
class _Slot:
    """One slot. `turns`: the groups that use it, in order. `group`: the one whose bytes are in `memory` after waiting for
    `ticket`."""

    memory: torch.Tensor
    turns: Sequence[WeightGroup]
    group: WeightGroup | None = None
    ticket: Ticket = field(default_factory=Ticket)


class Slots:
    """The slots of one model on a rank. There are none before `open`."""

    _sources: Callable[[str], torch.Tensor]  # set by `open`

    def __init__(self, copies: DeviceCopies, traffic: Traffic):
        """`traffic`: has the rank's clock and recorder."""
        self._copies, self._traffic = copies, traffic
        self._slots: list[_Slot] = []
        self._places: dict[str, tuple[_Slot, int]] = {}  # name of a group -> its slot, its number among the slot's turns
        self.bytes_copied = 0

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def nbytes(self) -> int:
        return sum(slot.memory.nbytes for slot in self._slots)

    def open(self, groups: Sequence[WeightGroup], sources: Callable[[str], torch.Tensor]) -> None:
        """Stream these groups, in the order in which they run, from `sources(name)`: [n] uint8 in host memory. Closes the
        present slots first. Nothing is copied yet."""
        self.close()
        largest = max((group.nbytes for group in groups), default=0)
        self._sources = sources
        for first in range(min(SLOTS, len(groups))):
            slot = _Slot(self._copies.allocate(largest), groups[first::SLOTS])
            self._slots.append(slot)
            for number, group in enumerate(slot.turns):
                self._places[group.name] = slot, number
                group.move(slot.memory)

    def close(self) -> None:
        """Wait for copies in progress and release the slots. A group whose parameters are views of a slot keeps its memory
        alive."""
        self.settle()
        for slot in self._slots:
            self._copies.release(slot.memory)
        self._slots, self._places = [], {}

    def begin_step(self) -> None:
        """Begin a micro-step: copy each slot's first block, unless it is there already."""
        for slot in self._slots:
            self._fetch(slot, 0)

    def enter(self, name: str) -> None:
        """To be called before a block computes. If the block is streamed, its bytes are in its slot afterwards."""
        if name not in self._places:
            return
        (slot, number), clock, recorder = self._places[name], self._traffic.clock, self._traffic.recorder
        self._fetch(slot, number)
        began = clock.now()
        slot.ticket.wait()
        recorder.add(FETCH, recorder.step, began, clock.now())

    def leave(self, name: str) -> None:
        """To be called after a block has computed. If it is streamed, the slot's next block is copied."""
        if name in self._places:
            slot, number = self._places[name]
            self._fetch(slot, number + 1)

    def present(self, name: str) -> None:
        """Between micro-steps: if the block is streamed, put its bytes into its slot, for the host to read."""
        if name in self._places:
            slot, number = self._places[name]
            self._fetch(slot, number)
            slot.ticket.finish()

    def forget(self, name: str) -> None:
        """Between micro-steps: have the group copied again, because its source has changed."""
        for slot in self._slots:
            if slot.group is not None and slot.group.name == name:
                slot.group = None

    def settle(self) -> None:
        """Wait for copies in progress."""
        for slot in self._slots:
            slot.ticket.finish()

    def report(self) -> tuple[int, float]:
        """Return (bytes copied, seconds waited for copies) since the last report."""
        copied, self.bytes_copied = self.bytes_copied, 0
        return copied, self._traffic.recorder.drain(FETCH)

    def _fetch(self, slot: _Slot, number: int) -> None:
        """Start to copy group `number` of the slot's turns, unless the slot has it already. After the last turn follows the
        first."""
        group = slot.turns[number % len(slot.turns)]
        if group is slot.group:
            return
        slot.group = group
        slot.ticket = self._copies.copy(slot.memory[: group.nbytes], self._sources(group.name)[: group.nbytes])
        self.bytes_copied += group.nbytes
