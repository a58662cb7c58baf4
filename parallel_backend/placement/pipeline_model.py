"""Seconds of a pipelined run: its micro-steps in their order, on stages of known cost. And the number of bands from that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from parallel_backend.core.pipefusion_order import MicroStep, micro_steps, window

HOP_SECONDS = 0.002
"""From the last stage through ComfyUI's sampler to the first: encoding, a thread's turn, a step of the sampler."""
BANDS_PER_STAGE = (1, 2, 4)
"""Numbers of bands that are considered, as multiples of the number of stages."""
AS_FAST = 1.05
"""Numbers of bands whose runs differ by less than this factor count as equally fast."""

StageSeconds = Callable[[MicroStep], Sequence[float]]
"""Seconds of a micro-step, by stage."""


@dataclass(frozen=True)
class StageCost:
    """Seconds of a stage's micro-step, as a line over its share of the image."""

    fixed: float
    """Seconds whatever the micro-step's size."""
    whole: float
    """Seconds beside the fixed ones for the whole image."""
    copies: float = 0.0
    """Seconds in which the stage's streamed weights come to the device, beside the computing, in every micro-step."""

    def seconds(self, share: float) -> float:
        """Seconds of a micro-step with this share of the image."""
        return max(self.copies, self.fixed + share * self.whole)

    def scaled(self, factor: float) -> "StageCost":
        """For an image of `factor` times as many tokens. By the same line: attention's growth beyond it is left out."""
        return replace(self, whole=factor * self.whole)


def simulate(
    steps: Sequence[MicroStep],
    bands: int,
    compute: StageSeconds,
    transfer: StageSeconds | None = None,
    hop: float = 0.0,
    entries: int = 1,
) -> list[float]:
    """When each call's last micro-step leaves the last stage.

    `compute`: seconds on each stage. An exact call is `entries` micro-steps of `compute(step)` each. `transfer`: seconds
    from each stage to the next one, beside the computing; None: none. `hop`: seconds from the last stage through the
    sampler to the first.
    """
    free = [0.0] * len(compute(steps[0]))
    ready = [0.0] * bands  # when each band's latest output is with the sampler
    ends: list[float] = []
    finished = [0.0] * (steps[-1].call + 1)
    under_way = window(len(free))
    for step in steps:
        covered = step.covers(bands)
        start = max(ready[band] for band in covered)
        seconds = compute(step)
        ways = transfer(step) if transfer is not None else [0.0] * len(free)
        for _ in range(entries if step.band is None else 1):
            time = max(start, ends[-under_way]) if len(ends) >= under_way else start
            for stage, (busy, way) in enumerate(zip(seconds, ways, strict=True)):
                free[stage] = max(time, free[stage]) + busy
                time = free[stage] + way
            ends.append(time)
        for band in covered:
            ready[band] = ends[-1] + hop
        finished[step.call] = ends[-1]
    return finished


def by_share(stage_costs: Sequence[StageCost], bands: int, entries: int = 1) -> StageSeconds:
    """Seconds of a micro-step. Bands share the image equally. A band has all batch entries, an exact micro-step one."""

    def seconds(step: MicroStep) -> list[float]:
        images = 1.0 if step.band is None else entries * len(step.covers(bands)) / bands
        return [cost.seconds(images) for cost in stage_costs]

    return seconds


def finish_times(
    exact: Sequence[bool], bands: int, stage_costs: Sequence[StageCost], hop: float = 0.0, entries: int = 1
) -> list[float]:
    """When each call leaves the last stage, for stages of these costs and transfers that cost nothing.

    This is what `num_pipeline_patch` 0 and the bounds in the documentation go by.
    """
    return simulate(micro_steps(exact, bands), bands, by_share(stage_costs, bands, entries), hop=hop, entries=entries)


def band_counts(stages: int, rows: int) -> list[int]:
    """Numbers of bands that a pipeline may use, for a picture of so many rows of tokens; ascending."""
    return sorted({min(factor * stages, rows) for factor in BANDS_PER_STAGE})


def choose_bands(
    stages: int, rows: int, steps: int, stage_costs: Sequence[StageCost] | None = None, entries: int = 1
) -> int:
    """Number of bands for `num_pipeline_patch` 0: the least with which a run of `steps` is about as fast as it can be.

    `rows`: of the picture's tokens. `stage_costs`: for a picture of this run's size. `entries`: of a call's batch.
    The pipeline is full from one band per stage on, with no slack for the hop. More bands hide the hop and the transfers,
    but make kernels smaller, which shows in the measured costs, and the other bands' keys older. Of `band_counts` the
    smallest is taken that is within AS_FAST of the fastest. No counts in between: the picture depends on the number of
    bands, so a measurement that comes out a little different must rarely change it. Without measured costs it is two per
    stage, and no more than 8 unless there are more stages.
    """
    if stages == 1:
        return 1
    if stage_costs is None:
        return min(max(stages, min(2 * stages, 8)), rows)
    exact = [True] + [False] * (steps - 1)
    counts = band_counts(stages, rows)
    times = {bands: finish_times(exact, bands, stage_costs, HOP_SECONDS, entries)[-1] for bands in counts}
    return min(bands for bands, seconds in times.items() if seconds <= AS_FAST * min(times.values()))
