"""Rehearsals of Parallel Doctor: a few steps of the proposed modes, on the real ranks with the whole model."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import median

from parallel_backend.checkpoints.checkpoint import Checkpoint, with_class
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.setup import Setup
from parallel_backend.placement.memory_model import Request
from parallel_backend.processes.pool import DeviceFull, Poll

from .calibrated_costs import CalibratedCosts
from .planner import Plan
from .prediction import Prediction, predict
from .workload import Workload

STEPS = 3
"""Steps of a rehearsed run: an exact step, and two in patches, because keys are extrapolated from the second one on."""
RUNS = 4
"""Maximum number of rehearsed runs of a mode. The first one allocates memory and chooses kernels."""
ENOUGH_SECONDS = 10.0
"""Seconds of rehearsed runs after which no more are made."""

Load = Callable[[Setup, Checkpoint, Request, Poll], AbstractContextManager[RemoteTransformer]]
"""Context of the model on its ranks, for a rehearsal. The model is unloaded at the end."""


def rehearse(
    plan: Plan,
    setup: Setup,
    checkpoint: Checkpoint,
    load: Load,
    poll_of: Callable[[str], Poll],
    on_proposal: Callable[[], None],
) -> Plan:
    """Return the plan with rehearsed seconds of its proposals.

    `setup`: the user's, for other devices and degrees; nothing is compiled or captured, as in a calibration. `poll_of`:
    returns a poll for a progress text. `on_proposal` is called after each proposal. If a proposal is refused or does not
    fit a device's memory, its `lacks` is the error's text. Raises RankError if a rank fails otherwise.
    """
    costs, names = plan.costs, plan.costs.machine.names
    plain, rehearsed = replace(setup, stage_split="auto", compile=False, cuda_graphs=False, planned=""), []
    for proposal in plan.proposals:
        degrees, trials = proposal.mode.degrees, costs.workload.trials
        assert trials is not None, "rehearsed modes have been tried"
        own = trials.class_for(degrees)
        devices = tuple(names[device] for device in proposal.mode.devices)
        of_mode = replace(plain, devices=devices, degrees=degrees, own_class=own)
        file = with_class(checkpoint, own)
        request = costs.workload.request(proposal.mode.exact, proposal.mode.bands)
        poll = poll_of(f"trying {proposal.mode} for a few steps")
        try:
            with load(of_mode, file, request, poll) as model:
                share = _seconds(model, proposal, costs.workload, poll) / _predicted(costs, proposal, setup)
            rehearsed.append(replace(proposal, seconds=share * proposal.seconds))
        except (DeviceFull, ValueError) as error:
            rehearsed.append(replace(proposal, lacks=str(error).partition("\n")[0]))
        on_proposal()
    return replace(plan, rehearsed=tuple(rehearsed))


def _predicted(costs: CalibratedCosts, proposal: Prediction, setup: Setup) -> float:
    """Return the predicted seconds of a rehearsed run, without ComfyUI's sampler."""
    workload = replace(costs.workload, steps=_steps(costs.workload))
    short = CalibratedCosts(replace(costs.calibration, hop=0.0), workload)
    return predict(short, proposal.mode, setup.offload).seconds


def _seconds(model: RemoteTransformer, proposal: Prediction, workload: Workload, poll: Poll) -> float:
    """Return the measured seconds of a rehearsed run: the median, without the first run if there are several."""
    built, mode, entries = model.built, proposal.mode, workload.entries
    example = built.example(workload.prompt)
    tensors = {name: tensor.repeat(entries, *(1,) * (tensor.ndim - 1)) for name, tensor in example.items()}
    prompt, sigmas = Prompt(tensors, {}, 1.0), linear_sigmas(_steps(workload))
    noise = built.noise((entries, *workload.shape[1:]))
    along = built.patching.best_axis(built.patching.grid(workload.shape))

    def run() -> float:
        started = time.perf_counter()
        if mode.exact:
            sample_whole(model, noise, sigmas, prompt, poll)
        else:
            sample_in_bands(model, noise, sigmas, prompt, mode.bands, 1, poll, along=along)
        return time.perf_counter() - started

    times = [run()]
    while len(times) < RUNS and sum(times) < ENOUGH_SECONDS:
        times.append(run())
    return median(times[1:] or times)


def _steps(workload: Workload) -> int:
    return min(STEPS, workload.steps)
