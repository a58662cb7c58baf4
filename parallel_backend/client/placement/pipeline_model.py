"""PipeFusion's schedule as data: which micro-steps there are, in which order, and what each stage does for one.

A *call* is one evaluation of the transformer by the sampler. An exact call is one micro-step over the whole latent; a
banded call is M micro-steps, one per band (patch). Every stage runs the same list in the same order, and a micro-step
moves only from a stage to the next one, so the traffic is acyclic. (PipeFusion: arXiv 2405.14430; there the last stage
sends back to the first, here that link is the sampler.)
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MicroStep:
    """`band` is None for an exact call: the whole latent."""

    call: int
    band: int | None


def micro_steps(exact: Sequence[bool], bands: int) -> list[MicroStep]:
    """All micro-steps of a run in the order in which every stage executes them. `exact[k]`: call k is exact."""
    return [MicroStep(call, band) for call, whole in enumerate(exact) for band in ([None] if whole else list(range(bands)))]


@dataclass(frozen=True)
class StageCost:
    """Seconds of a stage's micro-step: `fixed`, whatever its size, and `whole` more in proportion to its tokens."""

    fixed: float
    whole: float

    def seconds(self, share: float) -> float:
        """Of a micro-step with this share of the image."""
        return self.fixed + share * self.whole


def finish_times(exact: Sequence[bool], bands: int, stage_costs: Sequence[StageCost], hop: float = 0.0) -> list[float]:
    """When each call's last micro-step leaves the last stage, for a run of `micro_steps` on stages with these costs.

    The model behind `num_pipeline_patch` and the bounds in the documentation: transfers between stages cost nothing,
    the way from the last stage through the sampler to the first one costs `hop` seconds. A band's micro-step of call
    k+1 needs that band's output of call k; an exact call needs all outputs of the call before.
    """
    return finish_times_of(micro_steps(exact, bands), bands, stage_costs, hop)


def finish_times_of(
    steps: Sequence[MicroStep], bands: int, stage_costs: Sequence[StageCost], hop: float = 0.0
) -> list[float]:
    """`finish_times` for micro-steps in any order within a call."""
    free = [0.0] * len(stage_costs)
    ready = [0.0] * bands  # when band b's latest output is available
    finished = [0.0] * (steps[-1].call + 1)
    for step in steps:
        covered = range(bands) if step.band is None else (step.band,)
        time = max(ready[band] for band in covered)
        for stage, cost in enumerate(stage_costs):
            time = free[stage] = max(time, free[stage]) + cost.seconds(len(covered) / bands)
        for band in covered:
            ready[band] = time + hop
        finished[step.call] = max(ready) - hop
    return finished


HOP_SECONDS = 0.002
"""From the last stage through ComfyUI's sampler to the first: encoding, a thread's turn, a step of the sampler."""


def choose_bands(stages: int, rows: int, steps: int, stage_costs: Sequence[StageCost] | None = None) -> int:
    """Band count for `num_pipeline_patch = 0`: the least with which a run of `steps` is about as fast as it can be.

    The pipeline is full from M = N on, with no slack for the hop; more bands hide the hop and the transfers, but make
    kernels smaller, which shows in the measured costs, and the other bands' keys older. So of N, 2 N and 4 N (no more than
    there are token rows) the smallest that is within 5 % of the fastest. No counts in between: the picture depends on M,
    so a measurement that comes out a little different must rarely change it. Without measured costs two per stage, and
    no more than 8 unless the stages are.
    """
    if stages == 1:
        return 1
    if stage_costs is None:
        return min(max(stages, min(2 * stages, 8)), rows)
    exact = [True] + [False] * (steps - 1)
    times = {
        bands: finish_times(exact, bands, stage_costs, HOP_SECONDS)[-1]
        for bands in sorted({min(factor * stages, rows) for factor in (1, 2, 4)})
    }
    return min(bands for bands, seconds in times.items() if seconds <= 1.05 * min(times.values()))
