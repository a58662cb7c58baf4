"""Modes: the degrees and bands with which a number of devices can run a workload."""

import math
from dataclasses import dataclass, replace

from parallel_backend.core.degrees import WIDGETS, Degrees
from parallel_backend.core.validate import all_degrees
from parallel_backend.placement.pipeline_model import band_counts

from .workload import Workload


@dataclass(frozen=True)
class Mode:
    degrees: Degrees
    bands: int = 1
    """Number of PipeFusion's patches; 1 without PipeFusion."""
    device: int | None = None
    """The only device. None: the first `degrees.world` devices."""

    @property
    def exact(self) -> bool:
        """Whether every model call is exact, not only those of the warm-up."""
        return self.degrees.pipe == 1 and not self.degrees.displaced

    @property
    def stage_degrees(self) -> Degrees:
        """Degrees of one stage of one replica."""
        return replace(self.degrees, batch=1, pipe=1)

    @property
    def devices(self) -> range:
        """Device of each rank."""
        return range(self.degrees.world) if self.device is None else range(self.device, self.device + 1)

    def entries(self, workload: Workload) -> int:
        """Return the batch entries of the replica that has most."""
        return math.ceil(workload.entries / self.degrees.batch)

    def __str__(self) -> str:
        patches = f", {self.bands} patches" if self.bands > 1 else ""
        return f"{self.degrees}{patches}"


def possible(workload: Workload, world: int) -> tuple[list[Mode], dict[Degrees, str]]:
    """Return (every mode that uses all of `world` devices, at least two; other degrees -> the reason against them)."""
    modes, refused = [], {}
    for degrees in all_degrees(world):
        try:
            workload.sizes.check(degrees)
        except ValueError as reason:
            refused[degrees] = str(reason)
            continue
        if workload.trials is not None and (lacking := workload.trials.lacks(degrees)):
            refused[degrees] = lacking
            continue
        if degrees.batch > workload.entries:
            refused[degrees] = (
                f"{WIDGETS['batch']} is {degrees.batch}, but a model call has only {workload.entries} in its batch. The "
                "other GPUs would be idle."
            )
            continue
        counts = band_counts(degrees.pipe, workload.rows) if degrees.pipe > 1 else [1]
        fitting = [bands for bands in counts if min(workload.bands(bands)) >= degrees.sequence]
        if not fitting:
            refused[degrees] = f"the image has {workload.image} tokens, too few for this cut."
        modes += [Mode(degrees, bands) for bands in fitting]
    return modes, refused
