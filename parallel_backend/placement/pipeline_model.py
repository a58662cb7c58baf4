"""Seconds of a pipelined run, by simulating its micro-steps on stages of known cost; and the best number of bands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from parallel_backend.core.pipefusion_order import MicroStep, micro_steps, window

HOP_SECONDS = 0.002
"""Seconds from the last stage through ComfyUI's sampler to the first: encoding, a thread switch, a step of the sampler."""
BANDS_PER_STAGE = (1, 2, 4)
"""Numbers of bands that are considered, as multiples of the number of stages."""
AS_FAST = 1.05
"""Numbers of bands whose runs differ by less than this factor count as equally fast."""

StageSeconds = Callable[[MicroStep], Sequence[float]]
"""Seconds of a micro-step, by stage."""


@dataclass(frozen=True)
class StageCost:
    """Seconds of a stage's micro-step, as a linear function of its share of the image."""

    fixed: float
    """Seconds that do not depend on the size of the micro-step."""
    whole: float
    """Additional seconds for the whole image."""
    copies: float = 0.0
    """Seconds of copying the stage's streamed weights in every micro-step. Copies overlap computation."""

    def seconds(self, share: float) -> float:
        """Return the seconds of a micro-step with this share of the image."""
        return max(self.copies, self.fixed + share * self.whole)

    def scaled(self, factor: float) -> "StageCost":
        """Return the cost for an image with `factor` times as many tokens, by the same line: attention's quadratic growth is
        ignored."""
        return replace(self, whole=factor * self.whole)


def simulate(
    steps: Sequence[MicroStep],
    bands: int,
    compute: StageSeconds,
    transfer: StageSeconds | None = None,
    hop: float = 0.0,
    entries: int = 1,
) -> list[float]:
    """For each call, when its last micro-step leaves the last stage, in seconds from the run's start.

    `compute`: seconds on each stage. An exact call is `entries` micro-steps of `compute(step)` each. `transfer`: seconds
    from each stage to the next one, which overlap computation. `hop`: seconds from the last stage through the sampler to the
    first.
    """
    free = [0.0] * len(compute(steps[0]))  # when each stage can begin its next micro-step
    ready = [0.0] * bands  # when each band's latest output is with the sampler
    ends: list[float] = []
    finished = [0.0] * (steps[-1].call + 1)
    in_flight = window(len(free))
    for step in steps:
        covered = step.covers(bands)
        start = max(ready[band] for band in covered)
        seconds = compute(step)
        transfers = transfer(step) if transfer is not None else [0.0] * len(free)
        for _ in range(entries if step.band is None else 1):
            # The client posts at most `in_flight` micro-steps at a time, so this one waits for an earlier one's end.
            time = max(start, ends[-in_flight]) if len(ends) >= in_flight else start
            for stage, (busy, sending) in enumerate(zip(seconds, transfers, strict=True)):
                free[stage] = max(time, free[stage]) + busy
                time = free[stage] + sending
            ends.append(time)
        for band in covered:
            ready[band] = ends[-1] + hop
        finished[step.call] = ends[-1]
    return finished


def by_share(stage_costs: Sequence[StageCost], bands: int, entries: int = 1) -> StageSeconds:
    """Seconds of a micro-step. Bands share the image equally. A band has all batch entries, an exact micro-step has one."""

    def seconds(step: MicroStep) -> list[float]:
        images = 1.0 if step.band is None else entries * len(step.covers(bands)) / bands
        return [cost.seconds(images) for cost in stage_costs]

    return seconds


def finish_times(
    exact: Sequence[bool], bands: int, stage_costs: Sequence[StageCost], hop: float = 0.0, entries: int = 1
) -> list[float]:
    """For each call, when it leaves the last stage, for stages of these costs and transfers that cost nothing.
    `choose_bands` and the bounds in the documentation use it."""
    return simulate(micro_steps(exact, bands), bands, by_share(stage_costs, bands, entries), hop=hop, entries=entries)


def band_counts(stages: int, rows: int) -> list[int]:
    """Return the numbers of bands that a pipeline may use for an image of `rows` rows of tokens, ascending."""
    return sorted({min(factor * stages, rows) for factor in BANDS_PER_STAGE})


def choose_bands(
    stages: int, rows: int, steps: int, stage_costs: Sequence[StageCost] | None = None, entries: int = 1
) -> int:
    """Return the number of bands for `num_pipeline_patch` 0: the smallest of `band_counts` within AS_FAST of the fastest.

    `rows`: of the image's tokens. `stage_costs`: for an image of this run's size. `entries`: of a call's batch. With at
    least one band per stage the pipeline is full. More bands hide the hop and the transfers, but make kernels smaller, which
    shows in the measured costs, and the other bands' keys older. Counts in between are not considered: the image depends on
    the number of bands, so noise in a measurement must rarely change it. Without measured costs there are two bands per
    stage, and at most 8 unless there are more stages.
    """
    if stages == 1:
        return 1
    if stage_costs is None:
        return min(max(stages, min(2 * stages, 8)), rows)
    exact = [True] + [False] * (steps - 1)
    counts = band_counts(stages, rows)
    times = {bands: finish_times(exact, bands, stage_costs, HOP_SECONDS, entries)[-1] for bands in counts}
    return min(bands for bands, seconds in times.items() if seconds <= AS_FAST * min(times.values()))
