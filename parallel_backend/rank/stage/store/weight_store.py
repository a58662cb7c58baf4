"""Where a rank's weights are: on its device for good, in host memory and on the device whenever their block runs, or parked.

What is in host memory stays there when the weights come to the device, so that giving way again costs no copy. Nothing is
added to what a group's memory has from the file, since other ranks may read it: a parameter to add to is set apart.
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
    """Of one model on a rank."""

    def __init__(self, copies: DeviceCopies, host: HostStore, traffic: Traffic, resident: int | None = None):
        """`resident`: as Load.resident, for `load`; None: all is on the device."""
        self._copies, self._host, self._slots = copies, host, Slots(copies, traffic)
        self._heartbeat = traffic.heartbeat
        self._resident = resident
        self._groups: dict[str, WeightGroup] = {}  # the blocks in their order, then the ends
        self._on_device: dict[str, torch.Tensor] = {}  # groups with memory of their own there
        self._overwritten: set[str] = set()  # of these, those whose values are nowhere else
        self._away: set[str] = set()  # groups that are in host memory alone, without which nothing can be computed
        self._streamed_last: set[str] = set()  # when the model last worked

    @property
    def device_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._on_device.values()) + self._slots.nbytes

    @property
    def host_bytes(self) -> int:
        """See Loaded. Where the device's memory is the host's all counts as the device's."""
        return 0 if self._copies.unified else self._host.nbytes

    @property
    def peak_bytes(self) -> int:
        """See RunStats."""
        return self._copies.peak_bytes

    def load(self, weights: StageWeights, blocks: Iterable[str], progress: Progress) -> None:
        """Read `weights` to where they belong. `blocks`: the stage's own, in the order in which they run.

        MemoryError or torch.OutOfMemoryError where the device has too little memory.
        """
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
        """Have these modules, which are the blocks given to `load`, fetch their weights before they run."""

        def enter(name: str) -> None:
            if name in self._slots:
                self._slots.enter(name)

        def leave(name: str) -> None:
            if name in self._slots:
                self._slots.leave(name)

        assert blocks.keys() | {ENDS} == self._groups.keys(), "a streamed block would run with the bytes of another"
        for name, block in blocks.items():
            block.register_forward_pre_hook(lambda *_, name=name: enter(name))
            block.register_forward_hook(lambda *_, name=name: leave(name))

    @property
    def streams(self) -> bool:
        """Some blocks come to the device as they are needed."""
        return self._slots.nbytes > 0

    def begin_step(self) -> None:
        """A micro-step begins."""
        self._check_all_there()
        self._slots.begin_step()

    def set_resident(self, resident: int, working: bool = True) -> None:
        """See loading.SetResident. Between micro-steps only. Errors as of `load`.

        Groups that were written over stay on the device if host memory has no room for them: their values are nowhere else.
        Where the device's memory is the host's there is nothing to be gained, and nothing is done.
        """
        if self._copies.unified:
            return
        working = working and resident > 0
        streamed = self._streamed(resident) if working else set()
        staying = [name for name in self._groups if name not in streamed] if working else self._staying(resident)
        away = set() if working else self._groups.keys() - staying
        before = {name for name in self._groups if name in self._slots}
        if streamed == before and away == self._away:
            return
        for name in before:
            self._groups[name].move(self._host.tensor(name))  # or the slots would stay as long as parameters lie in them
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
        """(bytes streamed, seconds waited for them) since the last report."""
        return self._slots.report()

    def close(self) -> None:
        """Let copies under way end, and give the memory back. The model is of no use any more."""
        self._slots.close()
        for memory in self._on_device.values():
            self._copies.release(memory)
        self._on_device = {}
        self._host.close()

    def present(self, target: str) -> None:
        """Between micro-steps: the parameter has its values, to be read by the host, until another one is asked for."""
        name = self._group_of(target).name
        if name in self._slots:
            self._slots.present(name)

    def set_apart(self, target: str) -> nn.Parameter:
        """A parameter that is not packed, from now on in memory of its own, which is the caller's to write to."""
        self._check_all_there()
        self.present(target)
        return self._group_of(target).set_apart(target)

    def rejoin(self, target: str) -> None:
        """A parameter that was set apart has the values from before again."""
        self._group_of(target).rejoin(target)

    @torch.no_grad()
    def overwrite(self, target: str, values: torch.Tensor) -> None:
        """Replace the values of a parameter that is not packed, on this rank alone. Also where the weights are parked."""
        group = self._group_of(target)
        if group.name in self._away or group.name in self._slots:
            self._slots.settle()  # a copy under way may be from there
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
        """Names of the blocks to be streamed: with those that are streamed now, no more are moved than needed."""
        if not resident or self._copies.unified:
            return set()
        blocks = [name for name in self._groups if name != ENDS]
        now = [index for index, name in enumerate(blocks) if name in self._streamed_last]
        room = resident - self._groups[ENDS].nbytes
        return {blocks[index] for index in nearest_streamed([self._groups[name].nbytes for name in blocks], room, now)}

    def _staying(self, resident: int) -> list[str]:
        """Groups that stay on the device where nothing computes: the first ones, which are needed first."""
        staying = [name for name in (ENDS, *(name for name in self._groups if name != ENDS)) if name in self._on_device]
        while sum(self._groups[name].nbytes for name in staying) > resident:
            staying.pop()
        return staying

    def _stream(self, streamed: set[str]) -> None:
        if not self._away:
            self._streamed_last = streamed
        self._slots.open([group for name, group in self._groups.items() if name in streamed], self._source)

    def _source(self, name: str) -> torch.Tensor:
        """The group's bytes, to be copied from."""
        if not self._host.holds(name):
            self._slots.settle()  # they may come from the same buffer
        return self._host.source(name)

    def _allocate(self, name: str) -> torch.Tensor:
        memory = self._on_device[name] = self._copies.allocate(self._groups[name].nbytes)
        return memory

    def _to_host(self, names: list[str]) -> set[str]:
        """Have the values of groups that are on the device in host memory too, as far as it has room for the file's.

        Returns those that have to stay on the device, since host memory has no room for what was written over them.
        """
        for name in [name for name in names if name in self._overwritten]:
            try:
                memory = self._host.private(name, whole=True)
            except MemoryError:
                continue  # the host's store has logged it
            self._copies.copy(memory, self._on_device[name]).finish()
            self._overwritten.remove(name)
        kept = self._overwritten.intersection(names)
        leaving = [name for name in names if name not in kept]
        for name in self._host.to_write(leaving):
            self._copies.copy(self._host.tensor(name), self._on_device[name]).finish()
            self._host.written(name)
            self._heartbeat.done()
        self._host.wait(leaving)
        return kept

    def _to_device(self, names: list[str]) -> None:
        """Bring groups that are in host memory back for good."""
        tickets: list[Ticket] = []
        for name in names:
            memory = self._allocate(name)
            if tickets and not self._host.holds(name):
                tickets[-1].finish()  # the same buffer may be its source
            tickets.append(self._copies.copy(memory, self._host.source(name)))
            self._groups[name].move(memory)
            self._heartbeat.done()
        for ticket in tickets:
            ticket.finish()
