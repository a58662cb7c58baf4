"""The only prediction: seconds and memory of a run in a mode, from the costs of its micro-steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_backend.core.pipefusion_order import MicroStep, micro_steps
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.setup import ALLOWED, Offload
from parallel_backend.core.spans import Span
from parallel_backend.placement.balance import Balance, divide, spill_seconds, stage_ranks
from parallel_backend.placement.memory_model import MemoryNeed, bytes_by_block, bytes_outside_blocks, memory_by_rank
from parallel_backend.placement.model_sizes import weights_by_rank
from parallel_backend.placement.pipeline_model import simulate
from parallel_backend.wire.diagnosis import Probed

from .calibrated_costs import CalibratedCosts, StepCost, StepKind
from .memory import Holding, holdings, lacking
from .modes import Mode
from .workload import Workload

ENDS_SHARE = 0.5
"""Fraction of the computation around the blocks that one of several stages does: embedding and head are on different
stages."""


@dataclass(frozen=True)
class Prediction:
    mode: Mode
    seconds: float
    """Seconds of a sampling run, with the model loaded."""
    held: tuple[Holding, ...]
    """Memory of each rank."""
    lacks: str = ""
    """Why the mode does not fit. Empty if it does."""

    @property
    def memory(self) -> tuple[MemoryNeed, ...]:
        """Memory that each rank needs, including streamed weights."""
        return tuple(holding.need for holding in self.held)

    @property
    def most_memory(self) -> int:
        """Bytes of the device on the rank that needs most."""
        return max(holding.on_device for holding in self.held)

    @property
    def most_streamed(self) -> int:
        """Bytes that a micro-step copies to the device of the rank that streams most. 0: all weights stay on the devices."""
        return max(holding.streamed for holding in self.held)


def predict(costs: CalibratedCosts, mode: Mode, offload: Offload = ALLOWED) -> Prediction:
    """Predict the seconds and memory of a run in `mode`. `offload`: whether weights that do not fit may be streamed."""
    cut = cut_model(costs, mode, offload)
    model, machine = (costs.workload.sizes, mode.degrees, cut.stage_blocks), costs.machine
    needs = memory_by_rank(*model, (costs.workload.request(mode.exact, mode.bands),))
    held = holdings(machine, mode.devices, needs, weights_by_rank(*model), offload)
    return Prediction(mode, _seconds(costs, mode, cut, held), held, lacking(machine, mode, held))


def cut_model(costs: CalibratedCosts, mode: Mode, offload: Offload = ALLOWED) -> Balance:
    """Return the stages and patches as `stage_split` auto cuts them for this run."""
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


def _handed_on(workload: Workload, mode: Mode, rank: int, kind: StepKind) -> float:
    """Return the bytes of one batch entry's hidden states that a rank sends to the next stage."""
    degrees, at = mode.degrees, mode.degrees.coordinate(rank)
    if at.pipe == degrees.pipe - 1:
        return 0.0
    sequence = SequenceCut((1.0,), degrees.ring * degrees.ulysses, False)
    place = degrees.sequence_index(at)
    text = 0 if kind is StepKind.OTHER_BAND and not workload.text_in_bands else workload.text
    image = workload.image if kind is StepKind.EXACT else workload.band_image(mode.bands, kind is StepKind.FIRST_BAND)
    share = image / workload.image
    tokens = len(sequence.parts(Span(0, text))[place]) + share * len(sequence.parts(Span(0, workload.image))[place])
    return tokens * workload.sizes.token_bytes


def _kind(step: MicroStep) -> StepKind:
    if step.band is None:
        return StepKind.EXACT
    return StepKind.FIRST_BAND if step.with_text else StepKind.OTHER_BAND


def _seconds(costs: CalibratedCosts, mode: Mode, cut: Balance, held: Sequence[Holding]) -> float:
    workload, degrees, hop = costs.workload, mode.degrees, costs.calibration.hop
    exact = [mode.exact or step < workload.warm_up_steps for step in range(workload.steps)]
    steps = micro_steps(exact, mode.bands)
    step_costs = {kind: costs.step(mode, kind, cut) for kind in set(map(_kind, steps))}
    stages = stage_ranks(degrees)
    compute = {
        kind: [
            _stage_seconds(costs, mode, cost, span, ranks, held)
            for span, ranks in zip(cut.stage_blocks, stages, strict=True)
        ]
        for kind, cost in step_costs.items()
    }
    if degrees.pipe == 1:
        return sum(compute[_kind(step)][0] + hop for step in steps)
    entries, links = mode.entries(workload), costs.machine.links
    next_stage = degrees.sequence * degrees.tensor  # from a rank to the same rank of the next stage

    def transfer(kind: StepKind) -> list[float]:
        """For each stage, seconds of a transfer to the next stage over the slowest of its links."""
        together = 1 if kind is StepKind.EXACT else entries

        def seconds(rank: int) -> float:
            return links.send(rank, rank + next_stage, together * _handed_on(workload, mode, rank, kind))

        return [max(map(seconds, ranks)) for ranks in stages[:-1]] + [0.0]

    transfers = {kind: transfer(kind) for kind in step_costs}
    ends = simulate(steps, mode.bands, lambda step: compute[_kind(step)], lambda step: transfers[_kind(step)], hop, entries)
    return ends[-1] + hop


def _stage_seconds(
    costs: CalibratedCosts, mode: Mode, cost: StepCost, span: Span, ranks: list[int], held: Sequence[Holding]
) -> float:
    """Return the seconds of a micro-step on the slowest rank of the stage with the blocks `span`."""
    share = 1.0 if mode.degrees.pipe == 1 else ENDS_SHARE
    names = costs.workload.blocks[span.slice]

    def seconds(rank: int) -> float:
        around = share * cost.around[rank]
        computing = sum(cost.blocks[name][rank] for name in names)
        # Copies go on between micro-steps.
        return around + max(computing, held[rank].copy_seconds() - around - costs.calibration.hop)

    return max(map(seconds, ranks))
