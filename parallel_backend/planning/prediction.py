"""From what was rehearsed to whole runs: seconds, memory and traffic of a mode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from parallel_backend.client.placement.balance import divide
from parallel_backend.client.placement.memory_model import USABLE_MEMORY, Memory, held_weights
from parallel_backend.client.placement.pipeline_model import simulate
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.devices import on_ray
from parallel_backend.core.pipefusion_order import micro_steps
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span, split
from parallel_backend.wire.diagnosis import Probed

from .links import Machine
from .modes import CallKind, Mode, alone, banded_call, exact_call
from .rehearsal import AROUND, Cost, Rehearsed
from .workload import Workload

ENDS_SHARE = 0.5
"""Of what is around the blocks, the part that one stage does: embedding and head are apart, the rest is on every stage."""


@dataclass(frozen=True)
class Prediction:
    """`seconds` of a run, with the picture in memory and the model loaded. `step_bytes`: mesh axis -> bytes that each rank
    sends in a step after the warm-up. `memory`: by rank. `lacks`: why it does not fit; empty if it does.
    """

    mode: Mode
    seconds: float
    step_bytes: dict[str, tuple[int, ...]]
    memory: tuple[Memory, ...]
    lacks: str = ""

    @property
    def moved(self) -> int:
        """Bytes in a step, over all ranks."""
        return sum(map(sum, self.step_bytes.values()))


@dataclass(frozen=True)
class Rehearsals:
    """All that predictions come from."""

    subject: Workload
    machine: Machine
    rehearsed: dict[CallKind, Rehearsed]
    _stages: dict[Degrees, tuple[Span, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def block_seconds(self) -> list[dict[str, float]]:
        """By rank: of one block of each kind, whole picture, all ranks at work."""
        cost = self.rehearsed[CallKind(alone().cut, 1)].first
        return [{name: times[rank] for name, times in cost.blocks.items()} for rank in range(len(cost.around))]

    def one_rank(self, device: int) -> Prediction:
        """The model on this device, the others idle."""
        subject = self.subject
        whole, quiet = self.rehearsed[CallKind(alone().cut, subject.entries)], self.rehearsed[alone()]
        if self.machine.on_cpus:  # which share caches and memory; they are alike, and take entries one after the other
            seconds = subject.steps * (quiet.hop + subject.entries * self._whole_call(quiet.first, 0))
        else:
            seconds = subject.steps * (whole.hop + self._whole_call(whole.first, device))
        memory = Memory(subject.weight_bytes, 0, whole.activation_bytes[device])
        mode = Mode(alone().cut, device=device)
        return self._checked(Prediction(mode, seconds, {}, (memory,)), (device,))

    def predict(self, mode: Mode) -> Prediction:
        subject = self.subject
        exact = [step < subject.warm_up_steps for step in range(subject.steps)]
        if mode.degrees.pipe > 1:
            seconds = self._pipeline(mode, exact)
        else:
            calls = {True: self.rehearsed[exact_call(mode, subject)]}
            calls[False] = calls[True] if mode.exact else self.rehearsed[banded_call(mode, subject)]
            slowest = {
                whole: call.hop + max(self._whole_call(call.first, rank) for rank in range(mode.degrees.world))
                for whole, call in calls.items()
            }
            seconds = sum(slowest[whole or mode.exact] for whole in exact)
        found = Prediction(mode, seconds, self.step_bytes(mode), self._memory(mode))
        return self._checked(found, tuple(range(mode.degrees.world)))

    def stages(self, mode: Mode) -> tuple[Span, ...]:
        """As stage_split auto would cut the blocks."""
        subject, degrees = self.subject, mode.degrees
        if degrees in self._stages:
            return self._stages[degrees]
        cost = self.rehearsed[exact_call(mode, subject)].first
        probes = [
            Probed(
                rank,
                {name: (times[rank], times[rank]) for name, times in cost.blocks.items()},
                (cost.around[rank], cost.around[rank]),
                self.machine.ranks[rank].free_bytes,
            )
            for rank in range(degrees.world)
        ]
        sizes = [size // degrees.tensor for size in subject.block_bytes]
        self._stages[degrees] = divide(degrees, list(subject.blocks), sizes, probes).stage_blocks
        return self._stages[degrees]

    def step_bytes(self, mode: Mode, exact: bool = False) -> dict[str, tuple[int, ...]]:
        """Mesh axis -> bytes that each rank sends in one step."""
        subject, degrees = self.subject, mode.degrees
        stages = self.stages(mode) if degrees.pipe > 1 else (Span(0, len(subject.blocks)),)
        banded = not (exact or mode.exact)
        call = self.rehearsed[(banded_call if banded else exact_call)(mode, subject)]
        # A pipeline was rehearsed with one entry at a time where it takes them so.
        times = 1 if banded or degrees.pipe == 1 else mode.entries(subject)
        axes: dict[str, list[int]] = {}
        for rank in range(degrees.world):
            owned = subject.blocks[stages[degrees.coordinate(rank).pipe].slice]
            for name in (*owned, AROUND):
                for axis, counts in call.moved[name].items():
                    axes.setdefault(axis, [0] * degrees.world)[rank] += times * counts[rank]
            if degrees.pipe > 1:
                axes.setdefault("pipe", [0] * degrees.world)[rank] = self._sent_on(mode, stages, rank, 1.0)
        return {axis: tuple(counts) for axis, counts in axes.items() if any(counts)}

    def _sent_on(self, mode: Mode, stages: tuple[Span, ...], rank: int, share: float) -> int:
        """Bytes of hidden states that a rank sends to the next stage for this share of the image, with the text."""
        subject, degrees = self.subject, mode.degrees
        at = degrees.coordinate(rank)
        if at.pipe == degrees.pipe - 1:
            return 0
        cut = SequenceCut((1.0,), degrees.ring * degrees.ulysses, False)
        place = degrees.sequence_index(at)
        tokens = len(cut.text(subject.text)[place]) + share * len(cut.image(Span(0, subject.image))[place])
        entries = len(split(Span(0, subject.entries), degrees.batch)[at.batch])
        return round(tokens * entries * (1 + subject.carried[stages[at.pipe].stop]) * subject.token_bytes)

    def _whole_call(self, cost: Cost, rank: int) -> float:
        return cost.around[rank] + sum(cost.blocks[name][rank] for name in self.subject.blocks)

    def _pipeline(self, mode: Mode, exact: list[bool]) -> float:
        subject, degrees = self.subject, mode.degrees
        stages = self.stages(mode)
        whole, banded = (self.rehearsed[kind(mode, subject)] for kind in (exact_call, banded_call))
        ranks = range(degrees.world)
        members = [[rank for rank in ranks if degrees.coordinate(rank).pipe == stage] for stage in range(degrees.pipe)]

        def stage_cost(cost: Cost) -> list[float]:
            """By stage, of its slowest rank."""
            return [
                max(
                    ENDS_SHARE * cost.around[rank] + sum(cost.blocks[name][rank] for name in subject.blocks[span.slice])
                    for rank in own
                )
                for span, own in zip(stages, members, strict=True)
            ]

        def transfers(share: float) -> list[float]:
            """By stage, seconds to the next one over the slowest of its links."""
            apart = degrees.sequence * degrees.tensor
            return [
                max(self.machine.link(rank, rank + apart).seconds(self._sent_on(mode, stages, rank, share)) for rank in own)
                for own in members[:-1]
            ] + [0.0]

        costs = {None: stage_cost(whole.first), True: stage_cost(banded.first), False: stage_cost(banded.other)}
        links = {None: transfers(1.0), False: transfers(1 / mode.bands)}
        return pipeline_seconds(
            exact,
            mode.bands,
            mode.entries(subject),
            lambda band: costs[None if band is None else band == 0],
            lambda band: links[None if band is None else False],
            banded.hop,
        )

    def _memory(self, mode: Mode) -> tuple[Memory, ...]:
        subject, degrees = self.subject, mode.degrees
        stages = self.stages(mode) if degrees.pipe > 1 else (Span(0, len(subject.blocks)),)
        kinds = [kind(mode, subject) for kind in ((exact_call,) if mode.exact else (exact_call, banded_call))]
        calls = [self.rehearsed[kind] for kind in kinds]
        memory = []
        for rank in range(degrees.world):
            stage = degrees.coordinate(rank).pipe
            weights = held_weights(subject.block_bytes, subject.ends, degrees.tensor, stages[stage])
            peaks = [call.activation_bytes[rank] for call in calls]
            activations = None if None in peaks else max(peaks)
            memory.append(Memory(weights, calls[-1].buffer_bytes[rank] * len(stages[stage]), activations))
        return tuple(memory)

    def _checked(self, found: Prediction, ranks: tuple[int, ...]) -> Prediction:
        """With the reason if memory does not suffice."""
        machine = self.machine
        held = dict(zip(ranks, (memory.total for memory in found.memory), strict=True))
        lacks = lacking(held, machine.devices, [rank.free_bytes for rank in machine.ranks], machine.host_free_bytes)
        return Prediction(found.mode, found.seconds, found.step_bytes, found.memory, lacks)


def lacking(held: dict[int, int], devices: Sequence[str], free: Sequence[int | None], host_free: int | None) -> str:
    """Why ranks that need so many bytes do not fit; empty if they do. `free`: bytes on each rank's device."""
    lacks = ""
    on_host = sum(size for rank, size in held.items() if devices[rank] == "cpu")
    if host_free is not None and on_host > USABLE_MEMORY * host_free:
        lacks = f"the ranks need {gigabytes(on_host)} of memory together, {gigabytes(host_free)} is free"
    for rank in held:
        alone = on_ray(devices[rank])  # others may share theirs
        size = sum(held[other] for other in held if other == rank or (devices[other] == devices[rank] and not alone))
        if free[rank] is not None and size > USABLE_MEMORY * free[rank]:
            lacks = f"needs {gigabytes(size)} on {devices[rank]}, which has {gigabytes(free[rank])} free"
    return lacks


def pipeline_seconds(
    exact: list[bool],
    bands: int,
    entries: int,
    cost: Callable[[int | None], list[float]],
    transfer: Callable[[int | None], list[float]],
    hop: float,
) -> float:
    """When the last micro-step's output is with the client. `cost(band)`, `transfer(band)`: by stage."""
    steps = micro_steps(exact, bands)
    ends = simulate(steps, bands, lambda step: cost(step.band), lambda step: transfer(step.band), hop, entries)
    return ends[-1] + hop


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
