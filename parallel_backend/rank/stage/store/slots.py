"""The slots: memory on the device that streamed blocks use in turn.

Blocks are assigned to slots in turn, in the order in which they run. A block always has the same slot: its parameters stay
views of the slot, and only the bytes change. While a block computes in one slot, the next block's bytes are copied into
another. When a block ends, the next block of its slot is copied there. After a micro-step's last block come the first blocks
of the next micro-step. A block that runs out of turn is copied and waited for.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from parallel_backend.core.block_residency import SLOTS
from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.wire.timeline_kinds import FETCH

from .device_copies import DeviceCopies, Ticket
from .weight_group import WeightGroup


@dataclass
class _Slot:
    """One slot. `group`: name of the group whose bytes are in `memory` after waiting for `ticket`."""

    memory: torch.Tensor
    group: str | None = None
    ticket: Ticket = field(default_factory=Ticket)


class Slots:
    """The slots of one model on a rank. There are none before `open`."""

    _sources: Callable[[str], torch.Tensor]  # set by `open`

    def __init__(self, copies: DeviceCopies, traffic: Traffic):
        """`traffic`: has the rank's clock and recorder."""
        self._copies, self._traffic = copies, traffic
        self._slots: list[_Slot] = []
        self._groups: dict[str, WeightGroup] = {}
        self._slot_of: dict[str, _Slot] = {}
        self._order: list[str] = []  # streamed blocks in the order in which the last micro-step ran them
        self._next = 0  # index in the order of the block that is expected next
        self._seen: list[str] = []  # streamed blocks that ran in the micro-step in progress
        self.bytes_copied = 0

    def __contains__(self, name: str) -> bool:
        return name in self._slot_of

    @property
    def nbytes(self) -> int:
        return sum(slot.memory.nbytes for slot in self._slots)

    def open(self, groups: Sequence[WeightGroup], sources: Callable[[str], torch.Tensor]) -> None:
        """Stream these groups, in the order in which they run, from `sources(name)`: [n] uint8 in host memory. Closes the
        present slots first. Nothing is copied yet."""
        self.close()
        largest = max((group.nbytes for group in groups), default=0)
        self._sources, self._groups = sources, {group.name: group for group in groups}
        for _ in range(min(SLOTS, len(groups))):
            self._slots.append(_Slot(self._copies.allocate(largest)))
        self._take_turns(list(self._groups))

    def close(self) -> None:
        """Wait for copies in progress and release the slots. A group whose parameters are views of a slot keeps its memory
        alive."""
        self._empty()
        for slot in self._slots:
            self._copies.release(slot.memory)
        self._slots, self._slot_of, self._groups, self._order, self._seen, self._next = [], {}, {}, [], [], 0

    def begin_step(self) -> None:
        """Begin a micro-step. Blocks are expected in the order of the last micro-step."""
        if self._seen and self._seen != self._order:
            self._order = self._seen
            if set(self._order) == set(self._groups) and not self._well_apart(self._order):
                self._take_turns(self._order)
        self._seen, self._next = [], 0
        for slot in self._slots:
            if slot.group is None:
                self._refill(slot)

    def enter(self, name: str) -> None:
        """To be called before a block computes. If the block is streamed, its bytes are in its slot afterwards."""
        if name not in self._slot_of:
            return
        slot, clock, recorder = self._slot_of[name], self._traffic.clock, self._traffic.recorder
        self._seen.append(name)
        if slot.group != name:
            self._fetch(name, slot)
        began = clock.now()
        slot.ticket.wait()
        ended = clock.now()
        recorder.add(FETCH, recorder.step, began, ended)
        if name in self._order:
            self._next = next(index for index, expected in self._turns() if expected == name) + 1

    def leave(self, name: str) -> None:
        """To be called after a block has computed. If it is streamed, the slot's next block is copied."""
        if name in self._slot_of:
            self._refill(self._slot_of[name])

    def present(self, name: str) -> None:
        """Between micro-steps: if the block is streamed, put its bytes into its slot, for the host to read."""
        if name not in self._slot_of:
            return
        slot = self._slot_of[name]
        if slot.group != name:
            self._fetch(name, slot)
        slot.ticket.finish()

    def forget(self, name: str) -> None:
        """Between micro-steps: have the group copied again, because its source has changed."""
        for slot in self._slots:
            if slot.group == name:
                slot.group = None

    def settle(self) -> None:
        """Wait for copies in progress."""
        for slot in self._slots:
            slot.ticket.finish()

    def report(self) -> tuple[int, float]:
        """Return (bytes copied, seconds waited for copies) since the last report."""
        copied, self.bytes_copied = self.bytes_copied, 0
        return copied, self._traffic.recorder.drain(FETCH)

    def _turns(self) -> Iterator[tuple[int, str]]:
        """(index, name) of all blocks in order, in a circle from the expected block. A block may occur twice."""
        for index in range(self._next, self._next + len(self._order)):
            yield index % len(self._order), self._order[index % len(self._order)]

    def _take_turns(self, order: list[str]) -> None:
        """Assign the slots to the blocks in turn, in this order."""
        self._empty()
        self._order = list(order)
        for number, name in enumerate(dict.fromkeys(order)):
            slot = self._slots[number % len(self._slots)]
            self._slot_of[name] = slot
            self._groups[name].move(slot.memory)

    def _well_apart(self, order: list[str]) -> bool:
        """Whether consecutive blocks have different slots."""
        pairs = itertools.pairwise(dict.fromkeys(order))
        return all(self._slot_of[one] is not self._slot_of[other] for one, other in pairs)

    def _refill(self, slot: _Slot) -> None:
        """Start the copy of this slot's next block, unless it is in the slot already."""
        name = next((name for _index, name in self._turns() if self._slot_of[name] is slot), None)
        if name is not None and name != slot.group:
            self._fetch(name, slot)

    def _fetch(self, name: str, slot: _Slot) -> None:
        group = self._groups[name]
        slot.group = name
        slot.ticket = self._copies.copy(slot.memory[: group.nbytes], self._sources(name)[: group.nbytes])
        self.bytes_copied += group.nbytes

    def _empty(self) -> None:
        """Wait for copies in progress, and mark all slots as empty."""
        self.settle()
        for slot in self._slots:
            slot.group = None
