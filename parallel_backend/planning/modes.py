"""Which degrees there are for so many devices, and what has to be rehearsed to know how fast each is."""

import math
from dataclasses import dataclass, replace

from parallel_backend.client.placement.pipeline_model import band_counts
from parallel_backend.core.degrees import AXES, WIDGETS, Degrees
from parallel_backend.core.validate import factors

from .workload import Workload


@dataclass(frozen=True)
class Mode:
    """`degrees` on all devices, or one rank on device `device` alone. `bands`: PipeFusion's patches; 1 elsewhere."""

    degrees: Degrees
    bands: int = 1
    device: int | None = None

    @property
    def exact(self) -> bool:
        """Every model call is, not the warm-up alone."""
        return self.degrees.pipe == 1 and not self.degrees.displaced

    @property
    def cut(self) -> Degrees:
        """How one stage of one replica is cut."""
        return replace(self.degrees, batch=1, pipe=1)

    def entries(self, subject: Workload) -> int:
        """Of the batch, for the replica that has most."""
        return math.ceil(subject.entries / self.degrees.batch)

    def __str__(self) -> str:
        patches = f", {self.bands} patches" if self.bands > 1 else ""
        return f"{self.degrees}{patches}"


@dataclass(frozen=True)
class CallKind:
    """A model call as a replica cut by `cut` makes it for `entries` of the batch, all replicas at once.

    `buffered`: it belongs to a run, which keeps keys and values. `stale`: in `bands` patches with those of the call before;
    of one patch for displaced patches. `alone`: the first replica by itself, the others idle, which is quicker where ranks
    share caches and memory.
    """

    cut: Degrees
    entries: int
    bands: int = 1
    buffered: bool = False
    stale: bool = False
    alone: bool = False


def possible(subject: Workload, world: int) -> tuple[list[Mode], dict[Degrees, str]]:
    """Every mode that `world` devices, more than one, can be used in; other degrees, and why not."""
    modes, refused = [], {}
    for sizes in factors(world, len(AXES)):
        named = dict(zip(AXES, sizes, strict=True))
        try:
            degrees = Degrees(**named, patch_mode="displaced" if named["patch"] > 1 else "none")
            subject.check(degrees)
        except ValueError as why:
            if named["patch"] == 1 or named["pipe"] == 1:  # together they never go
                refused[Degrees(**named, patch_mode="displaced" if named["patch"] > 1 else "none")] = str(why)
            continue
        if degrees.batch > subject.entries:
            refused[degrees] = (
                f"{WIDGETS['batch']} is {degrees.batch}, and a model call has {subject.entries} in its batch: the others "
                "would have nothing to do."
            )
            continue
        counts = [1]
        if degrees.pipe > 1:
            counts = band_counts(degrees.pipe, subject.rows)
        row = subject.image // subject.rows
        fitting = [bands for bands in counts if subject.rows // bands * row >= degrees.sequence]
        if not fitting:
            refused[degrees] = f"the picture has {subject.image} tokens, too few to be cut so."
        modes += [Mode(degrees, bands) for bands in fitting]
    return modes, refused


def needed(modes: list[Mode], subject: Workload) -> list[CallKind]:
    """What these modes, and one rank, are worked out from; smaller ones first, so that memory peaks grow."""
    kinds = {alone(): None, CallKind(Degrees(), 1): None, CallKind(Degrees(), subject.entries): None}
    for mode in modes:
        kinds |= dict.fromkeys((exact_call(mode, subject), *([banded_call(mode, subject)] if not mode.exact else [])))
    return sorted(kinds, key=lambda kind: (kind.cut.sizes, kind.entries, -kind.bands, kind.stale, not kind.alone))


def alone() -> CallKind:
    return CallKind(Degrees(), 1, alone=True)


def exact_call(mode: Mode, subject: Workload) -> CallKind:
    """A micro-step of one: a pipeline is filled with the batch's entries one by one."""
    return CallKind(mode.cut, 1 if mode.degrees.pipe > 1 else mode.entries(subject), buffered=not mode.exact)


def banded_call(mode: Mode, subject: Workload) -> CallKind:
    return CallKind(mode.cut, mode.entries(subject), mode.bands, buffered=True, stale=True)
