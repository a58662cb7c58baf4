"""The one prediction: seconds, traffic and memory of a run in a mode, from the costs of its micro-steps.

The costs are measured in rehearsals of the mode itself (rehearsed_costs.py), or worked out from a calibration
(calibrated_costs.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from parallel_backend.core.pipefusion_order import MicroStep, micro_steps
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span, split
from parallel_backend.placement.balance import Balance, divide, spill_seconds
from parallel_backend.placement.memory_model import MemoryNeed, bytes_by_block, bytes_outside_blocks, memory_of
from parallel_backend.placement.model_sizes import rank_weights
from parallel_backend.placement.pipeline_model import simulate
from parallel_backend.placement.residency import ALLOWED, Offload
from parallel_backend.placement.streaming_model import streamed_seconds
from parallel_backend.wire.diagnosis import Probed

from .machine import Machine
from .memory import Holding, bytes_on_host, holdings, lacking
from .modes import Mode
from .workload import Workload

AROUND = ""
"""Stands where a block's name does for all that is not in a block."""
ENDS_SHARE = 0.5
"""Part of what is around the blocks that one stage of several does. Embedding and head are on different stages; the rest is
on all of them."""


class StepKind(Enum):
    """Micro-steps of one kind cost the same."""

    EXACT = "exact"
    """The whole latent. On a pipeline one batch entry of it."""
    FIRST_BAND = "first band"
    """The first band, with the text; or the whole latent with displaced patches. All batch entries."""
    OTHER_BAND = "other band"


@dataclass(frozen=True)
class StepCost:
    """Seconds of a micro-step. Figures by rank are in the order of the mode's ranks."""

    blocks: Mapping[str, tuple[float, ...]]
    """Kind of block -> by rank, of one such block, with its transfers."""
    around: tuple[float, ...]
    """By rank, of all that is not in a block."""
    hop: float = 0.0
    """From the ranks' output through the sampler to the next call."""


Sent = Mapping[str, Mapping[str, Sequence[float]]]
"""Kind of block, or AROUND -> mesh axis other than pipe -> bytes that each rank sends."""


class Costs(Protocol):
    """What a prediction needs to know of a workload on a machine."""

    workload: Workload
    machine: Machine

    def by_device(self, mode: Mode) -> StepCost:
        """What stages are cut by: of a whole call."""

    def step(self, mode: Mode, kind: StepKind, cut: Balance) -> StepCost: ...

    def sent(self, mode: Mode, exact: bool) -> Sent:
        """In a whole step, with all its calls' micro-steps."""

    def activations(self, mode: Mode) -> Sequence[int | None]:
        """By rank, measured bytes beside weights and K/V buffers. None: not measured, so the estimate counts."""


@dataclass(frozen=True)
class Prediction:
    mode: Mode
    seconds: float
    """Of a run, with the picture in memory and the model loaded."""
    step_bytes: dict[str, tuple[int, ...]]
    """Mesh axis -> bytes that each rank sends in a step after the warm-up."""
    held: tuple[Holding, ...]
    """By rank."""
    lacks: str = ""
    """Why it does not fit; empty if it does."""

    @property
    def moved(self) -> int:
        """Bytes in a step, over all ranks."""
        return sum(map(sum, self.step_bytes.values()))

    @property
    def memory(self) -> tuple[MemoryNeed, ...]:
        """By rank, with weights that are streamed."""
        return tuple(one.need for one in self.held)

    @property
    def most_memory(self) -> int:
        """Bytes of the device on the rank that needs most."""
        return max(one.on_device for one in self.held)

    @property
    def most_streamed(self) -> int:
        """Bytes that a micro-step brings to the device of the rank that streams most. 0: all weights stay on the devices."""
        return max(one.streamed for one in self.held)


def predict(costs: Costs, mode: Mode, offload: Offload = ALLOWED) -> Prediction:
    """`offload`: whether weights may be streamed where devices do not hold them."""
    cut = cut_model(costs, mode, offload)
    held = _holdings(costs, mode, cut, offload)
    machine = costs.machine
    sizes = dict(zip(mode.devices, (one.on_device for one in held), strict=True))
    on_host = bytes_on_host(machine, mode, held)
    lacks = lacking(sizes, machine.names, [device.memory for device in machine.devices], on_host, machine.host_free)
    exact = mode.exact or costs.workload.warm_up_steps == costs.workload.steps
    return Prediction(mode, _seconds(costs, mode, cut, held), step_bytes(costs, mode, cut, exact), held, lacks)


def cut_model(costs: Costs, mode: Mode, offload: Offload = ALLOWED) -> Balance:
    """The stages and patches as `stage_split` auto would cut them for this run."""
    workload, cost = costs.workload, costs.by_device(mode)
    request = workload.request(mode.exact, mode.bands)
    probes = [
        Probed(
            rank,
            {name: (times[rank], times[rank]) for name, times in cost.blocks.items()},
            (cost.around[rank], cost.around[rank]),
            costs.machine.devices[device].memory,
        )
        for rank, device in enumerate(mode.devices)
    ]
    sizes = bytes_by_block(workload.sizes, mode.degrees, (request,))
    other_bytes = bytes_outside_blocks(workload.sizes, mode.degrees, request)
    rates = [costs.machine.devices[device].copies for device in mode.devices] if offload.streams else []
    spill = spill_seconds(rates, request)
    return divide(mode.degrees, list(workload.blocks), sizes, probes, imagined=True, other_bytes=other_bytes, spill=spill)


def step_bytes(costs: Costs, mode: Mode, cut: Balance, exact: bool) -> dict[str, tuple[int, ...]]:
    """Mesh axis -> bytes that each rank sends in one step."""
    workload, degrees = costs.workload, mode.degrees
    sent, axes = costs.sent(mode, exact), {}
    for rank in range(degrees.world):
        at = degrees.coordinate(rank)
        for name in (*workload.blocks[cut.stage_blocks[at.pipe].slice], AROUND):
            for axis, counts in sent.get(name, {}).items():
                axes.setdefault(axis, [0.0] * degrees.world)[rank] += counts[rank]
        if degrees.pipe > 1:
            entries = len(split(Span(0, workload.entries), degrees.batch)[at.batch])
            kinds = [StepKind.EXACT] if exact else [_kind(step) for step in micro_steps([False], mode.bands)]
            handed_on = sum(_handed_on(workload, mode, cut, rank, kind) for kind in kinds)
            axes.setdefault("pipe", [0.0] * degrees.world)[rank] = entries * handed_on
    return {axis: tuple(map(round, counts)) for axis, counts in axes.items() if any(counts)}


def _handed_on(workload: Workload, mode: Mode, cut: Balance, rank: int, kind: StepKind) -> float:
    """Bytes of one batch entry's hidden states that a rank sends to the next stage."""
    degrees, at = mode.degrees, mode.degrees.coordinate(rank)
    if at.pipe == degrees.pipe - 1:
        return 0.0
    sequence = SequenceCut((1.0,), degrees.ring * degrees.ulysses, False)
    place = degrees.sequence_index(at)
    text = 0 if kind is StepKind.OTHER_BAND and not workload.text_in_bands else workload.text
    image = workload.image if kind is StepKind.EXACT else workload.band_image(mode.bands, kind is StepKind.FIRST_BAND)
    share = image / workload.image
    tokens = len(sequence.text(text)[place]) + share * len(sequence.image(Span(0, workload.image))[place])
    return tokens * (1 + workload.carried[cut.stage_blocks[at.pipe].stop]) * workload.sizes.token_bytes


def _kind(step: MicroStep) -> StepKind:
    if step.band is None:
        return StepKind.EXACT
    return StepKind.FIRST_BAND if step.with_text else StepKind.OTHER_BAND


def _seconds(costs: Costs, mode: Mode, cut: Balance, held: Sequence[Holding]) -> float:
    workload, degrees = costs.workload, mode.degrees
    exact = [mode.exact or step < workload.warm_up_steps for step in range(workload.steps)]
    steps = micro_steps(exact, mode.bands)
    cost = {kind: costs.step(mode, kind, cut) for kind in set(map(_kind, steps))}
    members = [
        [rank for rank in range(degrees.world) if degrees.coordinate(rank).pipe == stage] for stage in range(degrees.pipe)
    ]
    compute = {
        kind: [
            _stage_seconds(costs, mode, one, span, own, held) for span, own in zip(cut.stage_blocks, members, strict=True)
        ]
        for kind, one in cost.items()
    }
    if degrees.pipe == 1:
        return sum(compute[_kind(step)][0] + cost[_kind(step)].hop for step in steps)
    entries, apart, links = mode.entries(workload), degrees.sequence * degrees.tensor, costs.machine.links

    def transfer(kind: StepKind) -> list[float]:
        """By stage, seconds to the next one over the slowest of its links."""
        together = 1 if kind is StepKind.EXACT else entries
        sizes = [[(rank, together * _handed_on(workload, mode, cut, rank, kind)) for rank in own] for own in members[:-1]]
        return [max(links.send(rank, rank + apart, size) for rank, size in own) for own in sizes] + [0.0]

    transfers = {kind: transfer(kind) for kind in cost}
    hop = max(one.hop for one in cost.values())
    ends = simulate(steps, mode.bands, lambda step: compute[_kind(step)], lambda step: transfers[_kind(step)], hop, entries)
    return ends[-1] + hop


def _stage_seconds(
    costs: Costs, mode: Mode, cost: StepCost, span: Span, members: list[int], held: Sequence[Holding]
) -> float:
    """Of one stage's slowest rank, micro-step after micro-step."""
    share = 1.0 if mode.degrees.pipe == 1 else ENDS_SHARE
    names = costs.workload.blocks[span.slice]

    def seconds(rank: int) -> float:
        around = share * cost.around[rank]
        blocks = [cost.blocks[name][rank] for name in names]
        return around + streamed_seconds(blocks, held[rank].copy_seconds(), around + cost.hop)

    return max(map(seconds, members))


def _holdings(costs: Costs, mode: Mode, cut: Balance, offload: Offload) -> tuple[Holding, ...]:
    """By rank."""
    sizes, degrees, ranks = costs.workload.sizes, mode.degrees, range(mode.degrees.world)
    requests = (costs.workload.request(mode.exact, mode.bands),)
    estimates = [memory_of(sizes, degrees, cut.stage_blocks, rank, requests) for rank in ranks]
    needs = [
        estimate if peak is None else replace(estimate, activations=peak)
        for estimate, peak in zip(estimates, costs.activations(mode), strict=True)
    ]
    weights = [rank_weights(sizes, degrees.tensor, cut.stage_blocks[degrees.coordinate(rank).pipe]) for rank in ranks]
    return holdings(costs.machine, mode.devices, needs, weights, offload)
