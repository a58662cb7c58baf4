"""What several GPUs gained in a run, against one GPU as a kept calibration predicts it."""

from collections.abc import Iterator
from dataclasses import replace

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.devices import device_kind, on_ray
from parallel_backend.core.kept_file import kept_path
from parallel_backend.core.setup import Setup
from parallel_backend.planning.calibrated_costs import CalibratedCosts
from parallel_backend.planning.calibration import calibration_key
from parallel_backend.planning.calibration_file import NAME, load
from parallel_backend.planning.modes import Mode
from parallel_backend.planning.prediction import predict
from parallel_backend.planning.workload import workload_of

from ..ui.host import folder
from .eligibility import Sampling


def gained(sampling: Sampling, calls: float, seconds: float) -> str:
    """How much faster than on one GPU a run was that took so many seconds: "1.7 x one GPU". Empty where no calibration is
    kept, which Parallel Doctor and `degrees` auto make, or where no GPU alone holds the model. It measures nothing.

    `calls`: number of model calls with all prompts and the whole latent, as a sampler of the second order makes two a step.
    0 gives "": nobody knows what the run's calls cost."""
    setup, checkpoint = sampling.stub.setup, sampling.stub.checkpoint
    if not calls or setup.degrees.world == 1 or setup.own_class is not None or any(map(on_ray, setup.devices)):
        return ""
    steps = max(1, round(calls))
    for devices in _calibrated(setup):
        key = calibration_key(devices, checkpoint, setup.dtype, setup.attention)
        calibration = load(kept_path(folder(), key, NAME), key)
        if calibration is None or calibration.machine.names != devices:
            continue
        run = (sampling.shapes[0], sampling.entries, steps, sampling.text_tokens, "full", setup.compile)
        workload = workload_of(checkpoint, setup.dtype, devices[0], *run)
        costs = CalibratedCosts(calibration, replace(workload, warm_up=steps))
        alone = [predict(costs, Mode(Degrees(), device=number), setup.offload) for number in range(len(devices))]
        fitting = [prediction.seconds for prediction in alone if not prediction.lacks]
        if not fitting:
            return ""
        one = "rank" if device_kind(devices[0]) == "cpu" else "GPU"
        return f"{min(fitting) / seconds:.1f} x one {one}"
    return ""


def _calibrated(setup: Setup) -> Iterator[tuple[str, ...]]:
    """Devices for which a calibration may have been kept: the run's, and those that `auto` chose them from."""
    yield setup.devices
    if setup.planned:
        yield tuple(setup.planned.partition(" ")[0].split(","))
