"""Decides where a rank's weights are: always on its device, streamed (on the device only while their block runs), or parked.

Weights in host memory stay there when they come to the device, so that they can leave it again without a copy. A group's
memory keeps the file's values, because other ranks may read them. A parameter is moved to separate memory before anything is
added to it.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from parallel_backend.core.block_residency import nearest_streamed
from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.rank.host_memory.host_store import HostStore
from parallel_backend.rank.stage.weights import Progress, StageWeights

from .device_copies import DeviceCopies, Ticket
from .slots import Slots
from .weight_group import ENDS, WeightGroup, weight_groups


class WeightStore:
    """The weights of one model on a rank."""

    def __init__(self, copies: DeviceCopies, host: HostStore, traffic: Traffic, resident: int | None = None):
        """`resident`: the limit that `load` applies, see Load.resident. None: all weights are on the device."""
        self._copies, self._host, self._slots = copies, host, Slots(copies, traffic)
        self._heartbeat = traffic.heartbeat
        self._resident = resident
        self._groups: dict[str, WeightGroup] = {}  # the blocks in their order, then the ends
        self._on_device: dict[str, torch.Tensor] = {}  # groups that are on the device for good -> their memory
        self._overwritten: set[str] = set()  # groups on the device with values that no other memory or file has
        self._away: set[str] = set()  # parked groups: in host memory, and not streamed
        self._streamed_last: set[str] = set()  # groups that were streamed when the model last worked
        self.streams = False
        """Whether some blocks are copied to the device when they run."""

    @property
    def device_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._on_device.values()) + self._slots.nbytes

    @property
    def host_bytes(self) -> int:
        """See Loaded. If device and host share memory, all weights count as the device's."""
        return 0 if self._copies.unified else self._host.nbytes

    @property
    def peak_bytes(self) -> int:
        """See RunStats.peak_bytes."""
        return self._copies.peak_bytes

    def load(self, weights: StageWeights, blocks: Iterable[str], progress: Progress) -> None:
        """Read `weights` to host or device memory. `blocks`: the stage's blocks, in the order in which they run. Raises
        MemoryError or torch.OutOfMemoryError if the device has too little memory."""
        self._groups = weight_groups(weights, blocks)
        sizes = {name: group.nbytes for name, group in self._groups.items()}
        self._host.allot(sizes, lambda name, memory: self._groups[name].read(memory))
        if self._resident == 0 and not self._copies.unified:
            self._away = set(self._groups)
        streamed = self._streamed(self._resident)
        elsewhere = self._groups if self._away or self._copies.unified else streamed
        with weights.loading(progress):
            self._host.fill([name for name in self._groups if name in elsewhere])
            for name, group in self._groups.items():
                if name not in elsewhere or (self._copies.unified and not self._host.holds(name)):
                    group.read(self._allocate(name))
                elif self._copies.unified:
                    self._on_device[name] = self._host.tensor(name)
        for name, group in self._groups.items():
            if name not in streamed:
                group.move(self._on_device[name] if name in self._on_device else self._host.tensor(name))
        self._stream(streamed)

    def watch(self, blocks: Mapping[str, nn.Module]) -> None:
        """Have the modules of the loaded blocks fetch their weights before they run."""
        assert blocks.keys() | {ENDS} == self._groups.keys(), "a streamed block would run with the bytes of another"
        for name, block in blocks.items():
            block.register_forward_pre_hook(lambda *_, name=name: self._slots.enter(name))
            block.register_forward_hook(lambda *_, name=name: self._slots.leave(name))

    def begin_step(self) -> None:
        """Prepare for a micro-step: check that no weights are parked, and begin to stream."""
        self._check_all_there()
        if self.streams:
            self._slots.begin_step()

    def set_resident(self, resident: int) -> None:
        """Limit the weights on the device to `resident` bytes, see loading.SetResident. To be called between micro-steps.

        Raises the errors of `load`. Changed values of a group are in no file, so it stays on the device if host memory is
        full. Does nothing if device and host share memory.
        """
        if self._copies.unified:
            return
        streamed = self._streamed(resident)
        staying = [name for name in self._groups if name not in streamed] if resident > 0 else []
        away = self._groups.keys() - {*streamed, *staying}
        before = {name for name in self._groups if name in self._slots}
        if streamed == before and away == self._away:
            return
        for name in before:
            self._groups[name].move(self._host.tensor(name))  # else parameters would keep the slots' memory alive
        self._slots.close()
        leaving = [name for name in self._on_device if name not in staying]
        kept = self._to_host(leaving)
        self._away = away - kept
        for name in leaving:
            if name not in kept:
                self._groups[name].move(self._host.tensor(name))
                self._copies.release(self._on_device.pop(name))
        self._stream(streamed - kept)
        self._to_device([name for name in staying if name not in self._on_device])

    def report(self) -> tuple[int, float]:
        """Return (bytes streamed, seconds waited for them) since the last report."""
        return self._slots.report()

    def close(self) -> None:
        """Wait for copies in progress, and release the memory. The model cannot be used any more."""
        self._slots.close()
        for memory in self._on_device.values():
            self._copies.release(memory)
        self._on_device = {}
        self._host.close()

    def present(self, target: str) -> None:
        """Between micro-steps: make the parameter's values readable by the host, until `present` is called for another
        one."""
        self._slots.present(self._group_of(target).name)

    def set_apart(self, target: str) -> nn.Parameter:
        """Move a parameter that is not packed to separate memory, which the caller may write."""
        self._check_all_there()
        self.present(target)
        return self._group_of(target).set_apart(target)

    def rejoin(self, target: str) -> None:
        """Undo `set_apart`: the parameter has its previous values again."""
        self._group_of(target).rejoin(target)

    @torch.no_grad()
    def overwrite(self, target: str, values: torch.Tensor) -> None:
        """Replace the values of a parameter that is not packed, on this rank only. Also works for parked weights."""
        group = self._group_of(target)
        if group.name in self._away or group.name in self._slots:
            self._slots.settle()  # a copy in progress may read the memory that is written to below
            memory = self._host.private(group.name)
            self._slots.forget(group.name)
        elif self._copies.unified and self._host.holds(group.name):
            memory = self._on_device[group.name] = self._host.private(group.name)
            group.move(memory)
        else:
            memory = self._on_device[group.name]
            self._overwritten.add(group.name)
        place = group.values(target, memory)
        place.copy_(values.view(place.shape))

    def _check_all_there(self) -> None:
        if self._away:
            raise RuntimeError("the model's weights are parked in host memory: they have to come back before it is used")

    def _group_of(self, target: str) -> WeightGroup:
        return next(group for group in self._groups.values() if target in group)

    def _streamed(self, resident: int | None) -> set[str]:
        """Return the names of the blocks to stream. They are near those streamed last, so that few blocks move."""
        if not resident or self._copies.unified:
            return set()
        blocks = [name for name in self._groups if name != ENDS]
        last = [index for index, name in enumerate(blocks) if name in self._streamed_last]
        room = resident - self._groups[ENDS].nbytes
        return {blocks[index] for index in nearest_streamed([self._groups[name].nbytes for name in blocks], room, last)}

    def _stream(self, streamed: set[str]) -> None:
        if not self._away:
            self._streamed_last = streamed
        self.streams = bool(streamed)
        self._slots.open([group for name, group in self._groups.items() if name in streamed], self._source)

    def _source(self, name: str) -> torch.Tensor:
        """Return the group's bytes in host memory, as the source of a copy."""
        if not self._host.holds(name):
            self._slots.settle()  # `source` overwrites the buffer from which a copy in progress may read
        return self._host.source(name)

    def _allocate(self, name: str) -> torch.Tensor:
        memory = self._on_device[name] = self._copies.allocate(self._groups[name].nbytes)
        return memory

    def _to_host(self, names: list[str]) -> set[str]:
        """Copy groups from the device to host memory if it has room. Returns the groups that must stay on the device: they
        were overwritten, and host memory has no room for them."""
        for name in [name for name in names if name in self._overwritten]:
            try:
                memory = self._host.private(name, whole=True)
            except MemoryError:
                continue  # HostStore has logged it
            self._copies.copy(memory, self._on_device[name]).finish()
            self._overwritten.remove(name)
        kept = self._overwritten.intersection(names)
        leaving = [name for name in names if name not in kept]
        for name in self._host.to_write(leaving):
            self._host.page_lock(name)  # first, since a GPU copies into such memory several times as fast
            self._copies.copy(self._host.tensor(name), self._on_device[name]).finish()
            self._host.written(name)
            self._heartbeat.done()
        self._host.wait(leaving)
        return kept

    def _to_device(self, names: list[str]) -> None:
        """Copy groups from host memory to the device to stay there."""
        tickets: list[Ticket] = []
        for name in names:
            memory = self._allocate(name)
            if tickets and not self._host.holds(name):
                tickets[-1].finish()  # `source` overwrites the buffer from which that copy may read
            tickets.append(self._copies.copy(memory, self._host.source(name)))
            self._groups[name].move(memory)
            self._heartbeat.done()
        for ticket in tickets:
            ticket.finish()
