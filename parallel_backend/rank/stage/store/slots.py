"""The slots: places on the device in which streamed blocks take turns.

Slots are used in turn by the blocks in the order in which they run, and a block has always the same one: its parameters are
views of it for good, and only the bytes change. While a block computes in one slot the next one's bytes come into another.
As a block ends, the next that its slot is for is copied there; after the last block of a micro-step come the first ones of
the next. A block that comes out of turn is fetched and waited for.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from parallel_backend.core.block_residency import SLOTS
from parallel_backend.rank.comm.transfers import Elapsed, Traffic
from parallel_backend.wire.timeline_kinds import FETCH

from .device_copies import DeviceCopies, Ticket
from .weight_group import WeightGroup


@dataclass
class _Slot:
    """`group`: name of the one whose bytes are there once the `ticket` has been waited for."""

    memory: torch.Tensor
    group: str | None = None
    ticket: Ticket | None = None


class Slots:
    """Of one model on a rank. Empty until `open`."""

    def __init__(self, copies: DeviceCopies, traffic: Traffic):
        """`traffic`: the rank's clock and recorder."""
        self._copies, self._traffic = copies, traffic
        self._slots: list[_Slot] = []
        self._groups: dict[str, WeightGroup] = {}
        self._sources: Callable[[str], torch.Tensor] | None = None
        self._slot_of: dict[str, _Slot] = {}
        self._order: list[str] = []  # of the blocks of a micro-step, as far as they are streamed
        self._next = 0  # place in the order of the block that is expected next
        self._seen: list[str] = []  # what ran in the micro-step under way
        self.bytes_copied = 0
        self.waited = Elapsed(traffic.clock)

    def __contains__(self, name: str) -> bool:
        return name in self._slot_of

    @property
    def nbytes(self) -> int:
        return sum(slot.memory.nbytes for slot in self._slots)

    def open(self, groups: Sequence[WeightGroup], sources: Callable[[str], torch.Tensor]) -> None:
        """Stream these, in the order in which they run, from `sources(name)` [n] uint8 in host memory. Closes it first.

        Nothing is copied yet.
        """
        self.close()
        largest = max((group.nbytes for group in groups), default=0)
        self._sources, self._groups = sources, {group.name: group for group in groups}
        for _ in range(min(SLOTS, len(groups))):
            self._slots.append(_Slot(self._copies.allocate(largest)))
        self._take_turns(list(self._groups))

    def close(self) -> None:
        """Let copies under way end and give the slots back. Groups whose parameters still lie there keep the memory."""
        self._empty()
        for slot in self._slots:
            self._copies.release(slot.memory)
        self._slots, self._slot_of, self._groups, self._order, self._seen, self._next = [], {}, {}, [], [], 0

    def begin_step(self) -> None:
        """A micro-step begins: blocks are expected in the order of the one before."""
        if self._seen and self._seen != self._order:
            self._order = self._seen
            if set(self._order) == set(self._groups) and not self._well_apart(self._order):
                self._take_turns(self._order)
        self._seen, self._next = [], 0
        for slot in self._slots:
            if slot.group is None:
                self._refill(slot)

    def enter(self, name: str) -> None:
        """The block is about to compute: from here on its bytes are in its slot."""
        slot, clock, recorder = self._slot_of[name], self._traffic.clock, self._traffic.recorder
        self._seen.append(name)
        if slot.group != name:
            self._fetch(name, slot)
        began = clock.now()
        slot.ticket.wait()
        ended = clock.now()
        self.waited.add(began, ended)
        recorder.add(FETCH, recorder.step, began, ended)
        if name in self._order:
            self._next = self._place_of(name) + 1

    def leave(self, name: str) -> None:
        """The block has computed: its slot is for the next one."""
        self._refill(self._slot_of[name])

    def present(self, name: str) -> None:
        """Outside of micro-steps: the block's bytes are in its slot, to be read by the host."""
        slot = self._slot_of[name]
        if slot.group != name:
            self._fetch(name, slot)
        slot.ticket.finish()

    def forget(self, name: str) -> None:
        """Outside of micro-steps: the group's source is another one, and has to be copied anew."""
        for slot in self._slots:
            if slot.group == name:
                slot.group = None

    def settle(self) -> None:
        """Let copies under way end."""
        for slot in self._slots:
            if slot.ticket is not None:
                slot.ticket.finish()

    def report(self) -> tuple[int, float]:
        """(bytes copied, seconds waited for copies) since the last report."""
        copied, self.bytes_copied = self.bytes_copied, 0
        return copied, self.waited.drain()

    def _place_of(self, name: str) -> int:
        """In the order; from the expected block on, in a circle."""
        count = len(self._order)
        return next(at % count for at in range(self._next, self._next + count) if self._order[at % count] == name)

    def _take_turns(self, order: list[str]) -> None:
        """Give the blocks their slots by this order."""
        self._empty()
        self._order = list(order)
        for number, name in enumerate(dict.fromkeys(order)):
            slot = self._slots[number % len(self._slots)]
            self._slot_of[name] = slot
            self._groups[name].move(slot.memory)

    def _well_apart(self, order: list[str]) -> bool:
        """Neighbours have different slots."""
        pairs = itertools.pairwise(dict.fromkeys(order))
        return all(self._slot_of[one] is not self._slot_of[other] for one, other in pairs)

    def _refill(self, slot: _Slot) -> None:
        """Start the copy of the next block of the order that this slot is for, if it is not there already."""
        count = len(self._order)
        turns = (self._order[at % count] for at in range(self._next, self._next + count))
        name = next((name for name in turns if self._slot_of[name] is slot), None)
        if name is not None and name != slot.group:
            self._fetch(name, slot)

    def _fetch(self, name: str, slot: _Slot) -> None:
        group = self._groups[name]
        slot.group = name
        slot.ticket = self._copies.copy(slot.memory[: group.nbytes], self._sources(name)[: group.nbytes])
        self.bytes_copied += group.nbytes

    def _empty(self) -> None:
        """Nothing is in the slots, nor on the way there."""
        self.settle()
        for slot in self._slots:
            slot.group = slot.ticket = None
