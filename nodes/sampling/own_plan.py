"""Finds the modes that a model supports: its calls are tried before a plan is made, tensor degrees when one is chosen."""

from dataclasses import dataclass, replace
from typing import Any

import comfy.patcher_extension
import comfy.sample
import comfy.samplers
import torch

from parallel_backend.client.measurements import probe_of
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.own_class.plans.proof import Proof
from parallel_backend.planning.calibrated_costs import CalibratedCosts
from parallel_backend.planning.planner import choose, plan
from parallel_backend.planning.prediction import Prediction
from parallel_backend.planning.trials import Trials

from ..model.call.diffusion_model import RemoteDiffusionModel, remote_stub
from .eligibility import Sampling
from .pipefusion import AUTO_KEY, WRAPPER_KEY, prove


@dataclass(frozen=True)
class RunTrials:
    """Trials of the first step of a run, which show the modes that its model has, in bands too if `bands`. They change the
    model's setup."""

    sampling: Sampling
    setup: Setup
    """With the devices that may be used."""
    bands: bool

    def first(self) -> Trials:
        """Return the modes that are proven, without tensor degrees above 1. Raises ValueError if the class does not run."""
        return Trials(self.setup.own_class, {1: self._proof(1)})

    def with_tensor(self, trials: Trials, degree: int) -> Trials:
        """`trials` with the result of a trial for this tensor degree."""
        try:
            found: Proof | str = self._proof(degree)
        except ValueError as refused:  # such as host memory without room for it
            found = str(refused)
        return trials.with_tensor(degree, found)

    def chosen(self, costs: CalibratedCosts) -> tuple[Prediction, Trials]:
        """Return (the best mode that is proven, its trials), by the costs of a workload with `trials`."""
        assert costs.workload.trials is not None, "its calls have been tried"
        trials = replace(costs.workload.trials, guesses=True)
        while True:
            costs = replace(costs, workload=replace(costs.workload, trials=trials))
            prediction = choose(plan(costs, range(1, len(self.setup.devices) + 1), self.setup.offload))
            tensor = prediction.mode.degrees.tensor
            if tensor in trials.proofs:
                return prediction, trials
            trials = self.with_tensor(trials, tensor)

    def _proof(self, tensor: int) -> Proof:
        """Return the proof for one rank, or for this number of tensor ranks."""
        stub = self.sampling.stub
        stub.setup = replace(self.setup, devices=self.setup.devices[:1], degrees=Degrees(tensor=tensor))
        prove(self.sampling, self.bands)
        assert stub.run.proof is not None
        return stub.run.proof


def trials_of(
    model: Any, latent: dict[str, Any], steps: int, cfg: float, positive: Any, devices: tuple[str, ...], counts: list[int]
) -> Trials:
    """Return the modes that trials of a sampler's first step prove, for each of these `counts` of devices. The MODEL's setup
    is restored. Raises ValueError if there is no prompt, or if the class does not run."""
    stub = remote_stub(model)
    if positive is None:
        raise ValueError(f"positive: the trial of {stub.checkpoint.path.name} needs a prompt. Connect one.")
    before, found, patched = stub.setup, [], model.clone()
    setup = replace(before, planned=",".join(devices), devices=devices)

    def examine(executor: Any, *arguments: Any) -> torch.Tensor:
        sampling = Sampling(executor.class_obj, *arguments)
        tried = RunTrials(sampling, setup, bands=True)
        trials = tried.first()
        for degree in range(2, max(counts) + 1):
            if any(count % degree == 0 for count in counts):
                trials = tried.with_tensor(trials, degree)
        found.append(trials)
        return sampling.noise

    kind = comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE
    for key in (AUTO_KEY, WRAPPER_KEY):
        patched.remove_wrappers_with_key(kind, key)
    patched.add_wrapper_with_key(kind, "parallel_dit_doctor", examine)
    sampler = comfy.samplers.sampler_object("euler")
    sigmas = comfy.samplers.calculate_sigmas(patched.get_model_object("model_sampling"), "simple", steps)
    samples = comfy.sample.fix_empty_latent_channels(patched, latent["samples"])
    try:
        comfy.sample.sample_custom(patched, samples, cfg, sampler, sigmas, positive, positive, samples)
    finally:
        stub.setup = before
    return found[0]


def can_be_planned(stub: RemoteDiffusionModel) -> bool:
    """Whether the class's blocks can be timed with its last call."""
    return probe_of(stub.checkpoint, stub.setup.dtype, (2, 1)) is not None


def check_can_be_planned(stub: RemoteDiffusionModel, trials: Trials) -> None:
    """Raise ValueError for a UNet, and for a class whose blocks cannot be timed."""
    if trials.own.unet or not can_be_planned(stub):
        raise ValueError(
            f"model: Set the degrees by hand, because the blocks of {stub.checkpoint.path.name} cannot be timed. If cfg is "
            "not 1, start with split_batch_degree."
        )


def unplanned(trials: Trials, ranks: int, entries: int) -> Degrees:
    """Return the degrees for a class whose blocks cannot be timed: stages if they are proven, so that it fits; otherwise
    split batch."""
    ways = Degrees(pipe=ranks), Degrees(batch=min(ranks, entries))
    return next((degrees for degrees in ways if not trials.lacks(degrees)), Degrees())
