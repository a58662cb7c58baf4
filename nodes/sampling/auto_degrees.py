"""The loader's `degrees` auto: when a sampler starts, the planner chooses devices and degrees. The choice is kept."""

import contextlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import comfy.patcher_extension
import folder_paths
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.registry import ModelKey, registry
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.devices import on_ray
from parallel_backend.core.host_memory import host_memory
from parallel_backend.planning.calibrated_costs import CalibratedCosts, Calibration
from parallel_backend.planning.calibration import calibrate, calibration_key
from parallel_backend.planning.calibration_file import cached
from parallel_backend.planning.planner import choose, plan
from parallel_backend.planning.report import choice
from parallel_backend.planning.workload import workload_of
from parallel_backend.processes.pool import Pool

from ..model.patcher import RemoteModelPatcher, make_model
from ..ui.host import check_cancelled
from ..ui.node_text import say
from .eligibility import Sampling
from .pipefusion import WRAPPER_KEY

log = logging.getLogger(__name__)

AUTO_KEY = "parallel_dit_auto_degrees"
AS_SET, AUTO = "as set", "auto"
DEGREES = (AS_SET, AUTO)
KIND = comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE


def folder() -> Path:
    """Folder for calibrations and logs, in ComfyUI's user directory: the temporary one is emptied at each start."""
    return Path(folder_paths.get_user_directory()) / "parallel_dit"


def log_folder() -> Path:
    """Folder for the ranks' logs."""
    return folder() / "logs"


def calibrated(
    devices: tuple[str, ...], checkpoint: Checkpoint, dtype: str, attention: str, pool: Pool | None = None
) -> Calibration:
    """The calibration of these devices: kept from before, or measured now on the ranks of `pool` (None: borrowed here).

    The host's memory is what is free now.
    """

    def measure() -> Calibration:
        say("Parallel DiT: calibrating, about 10 s, once for this machine and kind of model")
        with contextlib.nullcontext(pool) if pool is not None else registry().borrow(devices, check_cancelled) as ranks:
            return calibrate(ranks, checkpoint, dtype, check_cancelled)

    if any(map(on_ray, devices)):  # the next ranks may be on other machines
        return measure()

    def fits(found: Calibration) -> bool:
        lists = {name for name, count in checkpoint.family.blocks.counts(checkpoint.config).items() if count}
        return found.machine.names == devices and all(set(cost.blocks) == lists for cost in found.costs)

    found = cached(folder(), calibration_key(devices, checkpoint, dtype, attention), measure, fits)
    return replace(found, machine=replace(found.machine, host_free=host_memory()[0]))


@dataclass(frozen=True)
class AutoDegrees:
    """ComfyUI's outermost SAMPLER_SAMPLE wrapper: sets the model's key before the sampler asks for the ranks."""

    checkpoint: Checkpoint
    key: ModelKey
    """Has all devices that may be used. Its degrees are ignored."""

    def __call__(self, executor, *arguments) -> torch.Tensor:
        sampling = Sampling(executor.class_obj, *arguments)
        sampling.guider.inner_model.diffusion_model.key = self.settled(sampling)
        return executor(*arguments)

    def settled(self, sampling: Sampling) -> ModelKey:
        """The key with planned degrees and devices: those of the loaded model, or a new plan for this run."""
        options = sampling.extra_args["model_options"]
        pipelines = comfy.patcher_extension.get_wrappers_with_key(KIND, WRAPPER_KEY, options, is_model_options=True)
        # A plan made for PipeFusion does not suit a run without it, nor the other way round: `planned` tells them apart.
        key = replace(self.key, planned=f"{','.join(self.key.devices)}{' pipelined' if pipelines else ''}")
        if (present := registry().planned(key)) is not None:
            return present
        warm_up = pipelines[-1].warmup_steps if pipelines else sampling.steps
        return self._planned(key, sampling, warm_up)

    def _planned(self, key: ModelKey, sampling: Sampling, warm_up: int) -> ModelKey:
        shape, devices, steps = sampling.shapes[0], key.devices, max(1, sampling.steps)
        run = (shape, sampling.entries, steps, sampling.text_tokens, key.transfer_dtype)
        workload = workload_of(self.checkpoint, key.dtype, devices[0], *run)
        if len(devices) == 1:
            return replace(key, degrees=Degrees())
        calibration = calibrated(devices, self.checkpoint, key.dtype, key.attention)
        costs = CalibratedCosts(calibration, replace(workload, warm_up=warm_up))
        found = choose(plan(costs, range(1, len(devices) + 1), key.offload))
        if found.lacks:
            log.warning("Parallel DiT: degrees auto: nothing fits these devices by its estimate; trying what needs least.")
        text = f"Parallel DiT: degrees auto: {choice(found, costs.machine)}"
        say(text)
        log.info("%s", text)
        mode = found.mode
        used = tuple(devices[device] for device in mode.devices)
        return replace(key, devices=used, degrees=mode.degrees)


def model_to_plan(checkpoint: Checkpoint, key: ModelKey, comm_overlap: bool) -> RemoteModelPatcher:
    """A MODEL that plans its degrees on the devices of `key` at its first run. Before that it counts as one rank."""
    if key.stage_split.strip().lower() not in ("auto", "even"):
        raise ValueError(
            f"stage_split is '{key.stage_split}', for stages that are not known while degrees is auto. Set stage_split to "
            "auto, or degrees to 'as set'."
        )
    model = make_model(checkpoint, replace(key, devices=key.devices[:1]), comm_overlap)
    model.model.diffusion_model.devices = key.devices
    model.add_wrapper_with_key(KIND, AUTO_KEY, AutoDegrees(checkpoint, key))
    return model
