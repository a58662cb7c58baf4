"""Costs as measured in rehearsals of the modes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.balance import ALIKE, Balance

from .machine import Machine
from .modes import Mode
from .prediction import Sent, StepCost, StepKind
from .rehearsal import CallKind, Rehearsed
from .workload import Workload

ALONE = CallKind(Degrees(), 1, alone=True)
ALL_AT_WORK = CallKind(Degrees(), 1)


@dataclass(frozen=True)
class RehearsedCosts:
    """The Costs of a workload."""

    workload: Workload
    machine: Machine
    rehearsed: Mapping[CallKind, Rehearsed]

    def block_seconds(self) -> list[dict[str, float]]:
        """By rank: seconds of one block of each kind, for the whole picture, while all ranks compute."""
        cost = self.rehearsed[ALL_AT_WORK].first
        return [{name: times[rank] for name, times in cost.blocks.items()} for rank in range(len(cost.around))]

    @property
    def uneven(self) -> bool:
        """The devices' speeds differ by more than noise."""
        totals = [sum(times.values()) for times in self.block_seconds()]
        return max(totals) > ALIKE * min(totals)

    def by_device(self, mode: Mode) -> StepCost:
        if mode.device is not None:
            return self._on_one(mode.device)
        return self.rehearsed[exact_call(mode, self.workload)].first

    def step(self, mode: Mode, kind: StepKind, cut: Balance) -> StepCost:
        if mode.device is not None:
            return self._on_one(mode.device)
        if kind is StepKind.EXACT:
            return self.rehearsed[exact_call(mode, self.workload)].first
        banded = self.rehearsed[banded_call(mode, self.workload)]
        return banded.first if kind is StepKind.FIRST_BAND else banded.other

    def sent(self, mode: Mode, exact: bool) -> Sent:
        if mode.device is not None:
            return {}
        if not exact:
            return self.rehearsed[banded_call(mode, self.workload)].sent
        call = exact_call(mode, self.workload)
        times = mode.entries(self.workload) // call.entries
        return {
            name: {axis: [times * count for count in counts] for axis, counts in axes.items()}
            for name, axes in self.rehearsed[call].sent.items()
        }

    def activations(self, mode: Mode) -> Sequence[int | None]:
        """By rank, the largest of all calls of the mode."""
        if mode.device is not None:
            return [self.rehearsed[whole_call(self.workload)].activation_bytes[mode.device]]
        kinds = [exact_call(mode, self.workload), *([] if mode.exact else [banded_call(mode, self.workload)])]
        peaks = zip(*(self.rehearsed[kind].activation_bytes for kind in kinds), strict=True)
        return [None if None in of_rank else max(of_rank) for of_rank in peaks]

    def _on_one(self, device: int) -> StepCost:
        """A whole call on one device, the others idle."""
        cost = self.rehearsed[whole_call(self.workload)].first
        if not self.machine.on_cpus:
            return _of_rank(cost, device, 1)
        # CPU ranks share caches and memory, so that one of them is quicker alone. All are equally fast, so rank 0 was timed
        # for one entry, and a CPU takes entries one by one.
        return _of_rank(self.rehearsed[ALONE].first, 0, self.workload.entries)


def _of_rank(cost: StepCost, rank: int, times: int) -> StepCost:
    blocks = {name: (times * seconds[rank],) for name, seconds in cost.blocks.items()}
    return replace(cost, blocks=blocks, around=(times * cost.around[rank],))


def needed(modes: list[Mode], workload: Workload) -> list[CallKind]:
    """The calls to rehearse for these modes, and for one device; smaller calls first, so that memory peaks grow."""
    kinds = {ALONE, ALL_AT_WORK, whole_call(workload)}
    for mode in modes:
        kinds |= {exact_call(mode, workload), *([] if mode.exact else [banded_call(mode, workload)])}
    return sorted(kinds, key=lambda kind: (kind.degrees.sizes, kind.entries, -kind.bands, kind.stale, not kind.alone))


def whole_call(workload: Workload) -> CallKind:
    """A call of one device."""
    return CallKind(Degrees(), workload.entries)


def exact_call(mode: Mode, workload: Workload) -> CallKind:
    """A micro-step of an exact call: a pipeline is filled with the batch's entries one by one."""
    entries = 1 if mode.degrees.pipe > 1 else mode.entries(workload)
    return CallKind(mode.stage_degrees, entries, buffered=not mode.exact)


def banded_call(mode: Mode, workload: Workload) -> CallKind:
    return CallKind(mode.stage_degrees, mode.entries(workload), mode.bands, buffered=True, stale=True)
