"""The speed-up by several GPUs in a sampling run, and of other settings, computed from a stored calibration."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.devices import device_kind, on_ray
from parallel_backend.core.setup import Setup
from parallel_backend.own_class.plans.proof import Proof
from parallel_backend.planning.calibrated_costs import CalibratedCosts, Calibration
from parallel_backend.planning.calibration import calibration_key, load
from parallel_backend.planning.modes import Mode
from parallel_backend.planning.planner import choose, credible, plan
from parallel_backend.planning.prediction import predict
from parallel_backend.planning.trials import Trials
from parallel_backend.planning.workload import workload_of

from ...ui.host import folder
from .sampling_run import CallShape

WORTH_SAYING = 1.1
"""The user is told about a setting if the run took at least this many times as long."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run on several ranks that took `seconds` for this number of model calls of each shape, `exact_calls` of them exact.

    It is compared with predictions, which need the calibration that Parallel Doctor and `degrees` auto store. Without one
    its texts are empty; nothing is measured for them.
    """

    setup: Setup
    checkpoint: Checkpoint
    calls: Mapping[CallShape, int]
    exact_calls: int
    seconds: float
    proof: Proof | None = None
    """Modes that it does not prove are not advised."""

    @cached_property
    def calibration(self) -> Calibration | None:
        """The calibration of the run's devices, or of those from which `auto` chose them. None: there is none."""
        setup = self.setup
        compiled = setup.compile  # a calibration knows nothing of compiled blocks
        if setup.degrees.world == 1 or compiled or any(map(on_ray, setup.devices)):
            return None
        for devices in self._calibrated():
            calibration = load(folder(), calibration_key(devices, self.checkpoint, setup.dtype, setup.attention))
            if calibration is not None and calibration.machine.names == devices:
                return calibration
        return None

    def gained(self) -> str:
        """Return how much faster the run was than on one GPU: "1.7 x one GPU". Empty if the model fits on no single GPU, or
        if the gain is not credible because the machine was busy."""
        calibration = self.calibration
        if calibration is None or not self.calls or not self.seconds:
            return ""
        costs = [self._costs(calibration, shape, count, count) for shape, count in self.calls.items()]
        fitting = []
        for device in range(len(calibration.machine.names)):
            predictions = [predict(each, Mode(Degrees(), device=device), self.setup.offload) for each in costs]
            if not any(prediction.lacks for prediction in predictions):
                fitting.append(sum(prediction.seconds for prediction in predictions))
        gain = min(fitting, default=0.0) / self.seconds
        return f"{gain:.1f} x one {self._unit}" if fitting and credible(gain, self.setup.degrees.world) else ""

    def advice(self) -> str:
        """Return a line with other degrees on the same devices that take at least a tenth less time. They must do so against
        the run's prediction and against its measured seconds. Empty if there are none, or if `degrees` auto has chosen."""
        calibration = self.calibration
        if calibration is None or len(self.calls) != 1 or self.setup.planned:
            return ""
        ((shape, count),) = self.calls.items()
        costs = self._costs(calibration, shape, count, self.exact_calls)
        every = plan(costs, range(1, len(calibration.machine.names) + 1), self.setup.offload)
        now = [each.seconds for each in every.predictions if each.mode.degrees == self.setup.degrees and not each.lacks]
        best = choose(every)
        if best.lacks or every.doubt or not now or min(*now, self.seconds) < WORTH_SAYING * best.seconds:
            return ""
        name = f"one {self._unit}" if best.mode.device is not None else str(best.mode)
        return f"{name} would take about {best.seconds:.1f} s (see Parallel Doctor)"

    @property
    def _unit(self) -> str:
        return "rank" if device_kind(self.setup.devices[0]) == "cpu" else "GPU"

    def _calibrated(self) -> Iterator[tuple[str, ...]]:
        yield self.setup.devices
        if self.setup.planned:
            yield tuple(self.setup.planned.partition(" ")[0].split(","))

    def _costs(self, calibration: Calibration, shape: CallShape, count: int, exact: int) -> CalibratedCosts:
        setup, entries = self.setup, shape.latent[0]
        run = (shape.latent, entries, count, shape.text_tokens, setup.transfer_dtype)
        workload = workload_of(self.checkpoint, setup.dtype, calibration.machine.names[0], *run)
        trials = None if self.proof is None else Trials(setup.own_class, {setup.degrees.tensor: self.proof})
        return CalibratedCosts(calibration, replace(workload, warm_up=exact, trials=trials))
