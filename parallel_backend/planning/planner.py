"""Every mode in which a machine can run a workload, ranked by predicted seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import ALLOWED, Offload

from .calibrated_costs import CalibratedCosts
from .modes import Mode, possible
from .prediction import Prediction, predict

AS_GOOD = 1.03
"""Modes within this factor of the fastest count as equally fast: the simplest of them is advised."""
CREDIBLE = 1.1
"""A gain over one device may exceed the number of ranks by at most this factor. More is not credible."""
PROPOSALS = 3
"""Number of degrees that Parallel Doctor rehearses."""
DISPLACED = 2
"""Maximum number of ranks on the patch axis that `degrees` auto uses. In measured images of 4, 8 and 20 steps, displaced
patches of two ranks were closer to one rank's image than PipeFusion with four patches. Displaced patches of four ranks were
not."""


@dataclass(frozen=True)
class Plan:
    costs: CalibratedCosts
    predictions: tuple[Prediction, ...]
    """Predictions, fastest first, including modes that do not fit. For one device, only that of the best device."""
    refused: dict[Degrees, str]
    """Degrees that the workload does not allow -> the reason."""
    rehearsed: tuple[Prediction, ...] = ()
    """The proposals, with seconds from a few measured steps of each. Empty: nothing is rehearsed, and predictions count."""

    @property
    def proposals(self) -> list[Prediction]:
        """The best fitting mode for each of the PROPOSALS best degrees, and that of one device, to compute gains."""
        left = [prediction for prediction in self.predictions if not prediction.lacks]
        found: list[Prediction] = []
        while len(found) < PROPOSALS and (best := advise(left)) is not None:
            found.append(best)
            left = [prediction for prediction in left if prediction.mode.degrees != best.mode.degrees]
        return found + [prediction for prediction in left if prediction.mode.device is not None]

    @property
    def best(self) -> Prediction | None:
        """The best of all modes that fit, including approximate ones (PipeFusion, displaced patches). None if no mode
        fits."""
        return advise(self._known)

    @property
    def doubt(self) -> str:
        """The reason for advising no degrees: these seconds gain more than the number of ranks. Empty if there is none. If
        one device has to stream weights, that is not a reason: N devices may then really be more than N times as fast."""
        one = self.one_device
        if one.lacks or one.most_streamed:
            return ""
        for fastest in self._known:
            gain, ranks = one.seconds / fastest.seconds, fastest.mode.degrees.world
            if not fastest.lacks and not credible(gain, ranks):
                return (
                    f"{gain:.2f}x on {ranks} ranks is not credible: the machine was busy while one device was measured. "
                    "Run this again when the machine is idle"
                )
        return ""

    @property
    def one_device(self) -> Prediction:
        both = *self.rehearsed, *self.predictions
        return next(prediction for prediction in both if prediction.mode.device is not None)

    @property
    def _known(self) -> tuple[Prediction, ...]:
        return self.rehearsed or self.predictions


def plan(costs: CalibratedCosts, counts: Sequence[int] | None = None, offload: Offload = ALLOWED) -> Plan:
    """Return the plan with all modes on the first `count` devices, for each of `counts`, and with the best single device.
    `counts` None: all devices. `offload`: whether weights that do not fit may be streamed."""
    devices = len(costs.machine.devices)
    modes: list[Mode] = []
    refused: dict[Degrees, str] = {}
    for count in counts or (devices,):
        if count > 1:
            possible_modes, reasons = possible(costs.workload, count)
            modes += possible_modes
            refused |= reasons
    singles = [predict(costs, Mode(Degrees(), device=device), offload) for device in range(devices)]
    one = min(singles, key=lambda prediction: (bool(prediction.lacks), prediction.seconds))
    predictions = [*(predict(costs, mode, offload) for mode in modes), one]
    return Plan(costs, tuple(sorted(predictions, key=lambda prediction: prediction.seconds)), refused)


def credible(gain: float, ranks: int) -> bool:
    """Whether this many ranks can be `gain` times as fast as one of them that has all weights in its memory."""
    return gain <= CREDIBLE * ranks


def advise(predictions: Sequence[Prediction]) -> Prediction | None:
    """Return the fastest mode that fits. Among equally fast ones: one device before several, exact modes before others,
    fewer patches."""
    fitting = [prediction for prediction in predictions if not prediction.lacks]
    if not fitting:
        return None
    limit = AS_GOOD * min(prediction.seconds for prediction in fitting)
    as_good = [prediction for prediction in fitting if prediction.seconds <= limit]
    return min(as_good, key=lambda f: (f.mode.device is None, not f.mode.exact, f.mode.bands, f.seconds))


def choose(plan: Plan) -> Prediction:
    """Return the choice of `degrees` auto: the best fitting mode among those close enough to one rank, or the one with the
    least memory. If the sampler does not pipeline, all steps of the workload are warm-up, and so exact in every mode."""
    workload = plan.costs.workload
    patches = DISPLACED if workload.warm_up_steps < workload.steps else 1
    usable = [prediction for prediction in plan.predictions if prediction.mode.degrees.patch <= patches]
    return advise(usable) or min(usable, key=lambda prediction: (prediction.most_memory, prediction.seconds))
