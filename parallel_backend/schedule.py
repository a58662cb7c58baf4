"""PipeFusion's schedule as data: which micro-steps there are, in which order, and what each stage does for one.

A *call* is one evaluation of the transformer by the sampler. An exact call is one micro-step over the whole latent; a
banded call is M micro-steps, one per band (patch). Every stage runs the same list in the same order, and a micro-step
moves only from a stage to the next one, so the traffic is acyclic. (PipeFusion: arXiv 2405.14430; there the last stage
sends back to the first, here that link is the sampler.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    RECEIVE = "receive"
    COMPUTE = "compute"
    SEND = "send"


@dataclass(frozen=True)
class MicroStep:
    """`band` is None for an exact call: the whole latent."""

    call: int
    band: int | None


def micro_steps(exact: Sequence[bool], bands: int) -> list[MicroStep]:
    """All micro-steps of a run in the order in which every stage executes them. `exact[k]`: call k is exact."""
    return [MicroStep(call, band) for call, whole in enumerate(exact) for band in ([None] if whole else list(range(bands)))]


def stage_ops(stage: int, stages: int) -> tuple[Op, ...]:
    """What `stage` does for each micro-step, in order. The engine executes exactly these."""
    ops = [Op.COMPUTE]
    if stage > 0:
        ops.insert(0, Op.RECEIVE)
    if stage < stages - 1:
        ops.append(Op.SEND)
    return tuple(ops)


def finish_times(exact: Sequence[bool], bands: int, stage_costs: Sequence[float]) -> list[float]:
    """When each call's last micro-step leaves the last stage, for stages with these costs of one *whole* micro-step.

    The model behind `num_pipeline_patch` and the bounds in the documentation: a band costs 1/M of the whole, transfers
    and the client's hop cost nothing. A band's micro-step of call k+1 needs that band's output of call k; an exact
    call needs all outputs of the call before.
    """
    free = [0.0] * len(stage_costs)
    ready = [0.0] * bands  # when band b's latest output is available
    finished = [0.0] * len(exact)
    for step in micro_steps(exact, bands):
        covered = range(bands) if step.band is None else (step.band,)
        time = max(ready[band] for band in covered)
        for stage, cost in enumerate(stage_costs):
            time = free[stage] = max(time, free[stage]) + cost * len(covered) / bands
        for band in covered:
            ready[band] = time
        finished[step.call] = max(ready)
    return finished


def choose_bands(stages: int, rows: int) -> int:
    """Band count for `num_pipeline_patch = 0`.

    The pipeline is full from M = N on; more bands give the sampler's hop and the transfers a slot to hide in, but make
    the kernels smaller and the other bands' keys older. Two per stage, and no more than 8 unless the stages are.
    """
    if stages == 1:
        return 1
    return min(max(stages, min(2 * stages, 8)), rows)
