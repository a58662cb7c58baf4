"""The loader's widget `degrees` at auto: the planner chooses devices and degrees when a sampler first starts."""

import logging
from dataclasses import dataclass, replace

import comfy.patcher_extension
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.registry import registry
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.devices import on_ray
from parallel_backend.core.host_memory import host_memory, room_for_weights
from parallel_backend.core.setup import Setup
from parallel_backend.core.short_text import short
from parallel_backend.placement.model_sizes import block_lists
from parallel_backend.planning.calibrated_costs import CalibratedCosts, Calibration
from parallel_backend.planning.calibration import calibrate, calibration_key, keep, lasting, load
from parallel_backend.planning.report import choice
from parallel_backend.planning.trials import Trials
from parallel_backend.planning.workload import workload_of

from ..model.loading.model_file import ModelFile
from ..model.patcher import RemoteModelPatcher, make_model
from ..ui.host import folder
from ..ui.loading_bar import Elapsed
from .eligibility import Sampling
from .own_plan import RunTrials, can_be_planned, unplanned
from .pipefusion import AUTO_KEY, WRAPPER_KEY

log = logging.getLogger(__name__)

AS_SET, AUTO = "as set", "auto"
DEGREES = (AS_SET, AUTO)
KIND = comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE


def calibrated(
    devices: tuple[str, ...], checkpoint: Checkpoint, dtype: str, attention: str, anew: bool = False
) -> Calibration:
    """Return the calibration of these devices, from its file or measured now. Its `host_free` is the present free memory.

    `anew`: it is measured in any case, with each GPU's free memory, and the file is overwritten.
    """
    key, lists = calibration_key(devices, checkpoint, dtype, attention), {*block_lists(checkpoint)}
    local = not any(map(on_ray, devices))  # Ray may place the next ranks on other machines: nothing to keep
    found = load(folder(), key) if local and not anew else None
    if found is not None and found.machine.names == devices and all(set(cost.blocks) == lists for cost in found.costs):
        return _with_host_memory(found)
    poll = Elapsed("calibrating, about 10 s, once for this machine and kind of model")
    with registry().borrow(devices, poll) as pool:
        measured = calibrate(pool, checkpoint, dtype, poll)
    if not local:
        return measured
    keep(folder(), key, lasting(measured))
    return _with_host_memory(measured if anew else lasting(measured))


def _with_host_memory(calibration: Calibration) -> Calibration:
    """Return the calibration with the host memory that CPU ranks, or the streamed weights of GPUs, may take now."""
    machine = calibration.machine
    free = host_memory()[0] if machine.on_cpus else max(0, room_for_weights(torch.device("cuda")))
    return replace(calibration, machine=replace(machine, host_free=free))


@dataclass(frozen=True)
class AutoDegrees:
    """ComfyUI's outermost SAMPLER_SAMPLE wrapper: sets the model's setup before the sampler asks for the ranks."""

    setup: Setup
    """The setup with all allowed devices. Its degrees are ignored."""

    def __call__(self, executor, *arguments) -> torch.Tensor:
        sampling = Sampling(executor.class_obj, *arguments)
        sampling.stub.setup = self.settled(sampling)
        return executor(*arguments)

    def settled(self, sampling: Sampling) -> Setup:
        """Return the setup with planned degrees and devices: that of the loaded model, or of a new plan for this run."""
        options = sampling.extra_args["model_options"]
        pipelines = comfy.patcher_extension.get_wrappers_with_key(KIND, WRAPPER_KEY, options, is_model_options=True)
        # A plan for PipeFusion does not suit a run without it, and vice versa: `planned` tells the two apart.
        setup = replace(
            self.setup,
            planned=f"{','.join(self.setup.devices)}{' pipelined' if pipelines else ''}",
            enlarged=sampling.stub.setup.enlarged,
        )
        if (present := registry().planned(setup)) is not None:
            return replace(present, keep_run=self.setup.keep_run)
        warm_up = pipelines[-1].warmup_steps if pipelines else sampling.steps
        return self._planned(setup, sampling, warm_up)

    def _planned(self, setup: Setup, sampling: Sampling, warm_up: int) -> Setup:
        shape, devices, steps = sampling.shapes[0], setup.devices, max(1, sampling.steps)
        stub, bands = sampling.stub, warm_up < steps
        if len(devices) == 1:
            return replace(setup, degrees=Degrees())
        tried = RunTrials(sampling, setup, bands)
        trials = tried.first()
        checkpoint = stub.checkpoint  # with the call that was tried
        if not can_be_planned(stub):
            return self._unplanned(setup, sampling, trials)
        run = (shape, sampling.entries, steps, sampling.text_tokens, setup.transfer_dtype)
        workload = workload_of(checkpoint, setup.dtype, devices[0], *run)
        calibration = calibrated(devices, checkpoint, setup.dtype, setup.attention)
        costs = CalibratedCosts(calibration, replace(workload, warm_up=warm_up, trials=trials))
        prediction, trials = tried.chosen(costs)
        if prediction.lacks:
            log.warning(
                "Parallel DiT: degrees auto: by its estimate nothing fits these devices; the mode that needs "
                "the least memory is tried."
            )
        stub.run.tell(f"degrees auto: {choice(prediction, costs.machine)}")
        mode = prediction.mode
        chosen_devices = tuple(devices[device] for device in mode.devices)
        return replace(setup, devices=chosen_devices, degrees=mode.degrees, own_class=trials.class_for(mode.degrees))

    def _unplanned(self, setup: Setup, sampling: Sampling, trials: Trials) -> Setup:
        """Return the setup for a class whose blocks cannot be timed."""
        degrees = unplanned(trials, len(setup.devices), sampling.entries)
        devices = setup.devices[: degrees.world]
        name = trials.own.name
        sampling.stub.run.tell(f"degrees auto: {degrees} on {', '.join(devices)}, because {name} cannot be timed")
        return replace(setup, devices=devices, degrees=degrees, own_class=trials.class_for(degrees))


def check_no_stages(stage_split: str) -> None:
    """Raise ValueError if `stage_split` names stages, which are unknown while `degrees` is auto."""
    if stage_split.strip().lower() not in ("auto", "even"):
        raise ValueError(
            f"Set stage_split to auto, or degrees to 'as set': stage_split is '{short(stage_split)}', but the stages are "
            "unknown if degrees is auto."
        )


def model_to_plan(file: ModelFile, setup: Setup, comm_overlap: bool) -> RemoteModelPatcher:
    """A MODEL that plans its degrees on the devices of `setup` at its first run. Until then its setup has one rank."""
    check_no_stages(setup.stage_split)
    model = make_model(file, replace(setup, devices=setup.devices[:1]), comm_overlap, setup.devices)
    model.add_wrapper_with_key(KIND, AUTO_KEY, AutoDegrees(setup))
    return model
