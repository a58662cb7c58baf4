"""Every way to use a machine for a workload, ranked."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.residency import ALLOWED, Offload

from .modes import Mode, possible
from .prediction import Costs, Prediction, predict

AS_GOOD = 1.03
"""Modes within this factor of the fastest count as equally fast: the simplest of them is advised."""
DISPLACED = 2
"""Ranks on the patch axis that auto takes: displaced patches of two are as close to one rank as PipeFusion with four
patches, those of more are not (docs/decisions.md, 151)."""


@dataclass(frozen=True)
class Plan:
    costs: Costs
    predictions: tuple[Prediction, ...]
    """Fastest first, those that do not fit too. Of one device, that of the best device."""
    refused: dict[Degrees, str]
    """Degrees that cannot be, and why."""

    @property
    def best(self) -> Prediction | None:
        """Of all that fit, PipeFusion and displaced patches too, which are approximate. None if nothing fits."""
        return advise(self.predictions)

    @property
    def best_exact(self) -> Prediction | None:
        return advise([found for found in self.predictions if found.mode.exact])

    @property
    def one_device(self) -> Prediction:
        return next(found for found in self.predictions if found.mode.device is not None)


def plan(costs: Costs, counts: Sequence[int] | None = None, offload: Offload = ALLOWED) -> Plan:
    """All modes of `counts` devices, the first so many (None: all of them), and of the best single one.

    `offload`: whether weights may be streamed where they do not fit.
    """
    devices, refused = len(costs.machine.devices), {}
    modes: list[Mode] = []
    for count in counts or (devices,):
        if count > 1:
            found, why = possible(costs.workload, count)
            modes += found
            refused |= why
    singles = [predict(costs, Mode(Degrees(), device=device), offload) for device in range(devices)]
    one = min(singles, key=lambda found: (bool(found.lacks), found.seconds))
    predictions = [*(predict(costs, mode, offload) for mode in modes), one]
    return Plan(costs, tuple(sorted(predictions, key=lambda found: found.seconds)), refused)


def advise(predictions: Sequence[Prediction]) -> Prediction | None:
    """The fastest that fits; among those as fast one device before more, exact modes before others, fewer patches."""
    fitting = [found for found in predictions if not found.lacks]
    if not fitting:
        return None
    limit = AS_GOOD * min(found.seconds for found in fitting)
    as_good = [found for found in fitting if found.seconds <= limit]
    return min(as_good, key=lambda f: (f.mode.device is None, not f.mode.exact, f.mode.bands, f.seconds))


def choose(plan: Plan) -> Prediction:
    """What `degrees` auto takes: of all modes that are close enough the best that fits, or else the one that needs least
    memory.

    PipeFusion and displaced patches are to be had where the sampler pipelines; elsewhere the workload's steps are all
    warm-up, and so exact.
    """
    workload = plan.costs.workload
    patches = DISPLACED if workload.warm_up_steps < workload.steps else 1
    usable = [found for found in plan.predictions if found.mode.degrees.patch <= patches]
    return advise(usable) or min(usable, key=lambda found: (found.most_memory, found.seconds))
