"""Parallel Doctor: finds which degrees are fastest on this machine, for this model and image, and says why."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import comfy.utils

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.registry import registry
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.setup import Setup
from parallel_backend.core.validate import check_one_kind
from parallel_backend.placement.memory_model import Request
from parallel_backend.planning.another_gpu import CHOICES, NONE, plans, with_another
from parallel_backend.planning.calibrated_costs import CalibratedCosts
from parallel_backend.planning.planner import Plan, plan
from parallel_backend.planning.rehearsal import rehearse
from parallel_backend.planning.report import describe, describe_another, verdict, verdict_on_another
from parallel_backend.planning.workload import workload_of
from parallel_backend.processes.pool import Poll

from .model.call.diffusion_model import RemoteDiffusionModel, remote_stub
from .model.run.make_room import make_room
from .parallel_config import ParallelConfig, config_of
from .sampling.auto_degrees import calibrated_anew
from .sampling.own_plan import check_can_be_planned, trials_of
from .ui.devices import check_one_kind_of_devices, gpus, is_auto, named_devices, why_hidden
from .ui.input_checks import validate
from .ui.loading_bar import Elapsed
from .ui.node_text import show_report
from .ui.widgets import CATEGORY, cfg_scale, choice, link, text, whole_number


def doctor_devices(widget: str, stub: RemoteDiffusionModel) -> tuple[str, ...]:
    """Devices that the widget names. `auto`: all GPUs, or the model's CPU ranks if there is no GPU.

    Raises ValueError for a device that does not exist, and for a mixture of GPUs and CPUs.
    """
    devices = (gpus() or stub.devices) if is_auto(widget) else named_devices(widget)
    check_one_kind(devices)
    return devices


@contextmanager
def loaded(setup: Setup, checkpoint: Checkpoint, request: Request, poll: Poll) -> Iterator[RemoteTransformer]:
    """Context with the model on its ranks, for a rehearsal (rehearsal.Load). It is unloaded at the end."""
    try:
        yield registry().model(setup, poll, make_room=make_room, expected=lambda: request, opened=checkpoint)
    finally:
        registry().unload(setup)


def advised_config(found: Plan, stub: RemoteDiffusionModel) -> ParallelConfig:
    """Return the MODEL's settings with the advised degrees, or with those of one device if nothing can be advised."""
    config = config_of(stub)
    if found.best is None or found.doubt:
        return config
    degrees = found.best.mode.degrees
    return replace(
        config,
        ulysses_degree=degrees.ulysses,
        ring_degree=degrees.ring,
        patch_mode=degrees.patch_mode,
        patch_degree=degrees.patch,
    )


@validate(early=check_one_kind_of_devices)
class ParallelDoctor:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("multi gpu", "multigpu", "benchmark", "gpu check", "which degrees")
    RETURN_TYPES = ("STRING", "PARALLEL_CONFIG")
    RETURN_NAMES = ("report", "parallel_config")
    FUNCTION = "examine"
    OUTPUT_NODE = True
    DESCRIPTION = (
        "Finds the fastest degrees on this machine. It measures devices, links and a few of the model's blocks, "
        "predicts the seconds of a run in every mode, and tries the best three. It also says if one GPU alone is best."
    )

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "model": link("MODEL", "From Parallel DiT Loader or Parallelize Model. Its degrees are ignored."),
                "latent_image": link("LATENT", "The latent that you want to sample. Only its size and batch matter."),
                "steps": whole_number(20, 1, 10000, "Denoising steps of the run."),
                "cfg": cfg_scale("The same as in the sampler. At 1 the model runs one prompt, otherwise two."),
                "text_tokens": whole_number(256, 1, 100000, "Has no effect: the prompt's length comes from positive."),
                "devices": text(
                    "auto", "auto (all GPUs; without a GPU, the model's CPU ranks), or a list such as cuda:0,cuda:1."
                ),
            },
            "optional": {
                "positive": link("CONDITIONING", "The prompt, which the trial needs."),
                "another_gpu": choice(
                    [NONE, *CHOICES],
                    NONE,
                    "A GPU that you do not have: the report says what it would add, by prediction. PCIe x4 and x8 are lanes "
                    "of PCIe 4.0.",
                ),
            },
        }

    def examine(self, model, latent_image, steps, cfg, text_tokens, devices, positive=None, another_gpu=NONE):
        stub = remote_stub(model)
        setup, chosen = stub.setup, doctor_devices(devices, stub)
        another, counts = CHOICES.get(another_gpu), [len(chosen)]
        if another is not None:
            counts.append(len(chosen) + 1)
        trials = trials_of(model, latent_image, steps, cfg, positive, chosen, counts)
        check_can_be_planned(stub, trials)
        checkpoint = stub.checkpoint
        words = max(cond[0].shape[1] for cond in positive)
        shape = tuple(latent_image["samples"].shape)
        if checkpoint.built.patching.video and len(shape) == 4:  # an image for a model of videos, as samplers take it
            shape = (*shape[:2], 1, *shape[2:])
        entries = shape[0] * (1 if cfg == 1.0 else 2)
        run = (shape, entries, steps, words, setup.transfer_dtype)
        workload = replace(workload_of(checkpoint, setup.dtype, chosen[0], *run), trials=trials)
        calibration = calibrated_anew(chosen, checkpoint, setup.dtype, setup.attention)
        costs = CalibratedCosts(calibration, workload)
        more = None if another is None else with_another(costs, another)
        found = plan(costs, offload=setup.offload)
        progress, done = comfy.utils.ProgressBar(1), itertools.count(1)

        def advance() -> None:
            progress.update_absolute(next(done), len(found.proposals))

        found = rehearse(found, setup, checkpoint, loaded, Elapsed, advance)
        report, answer = describe(found), verdict(found)
        if len(set(chosen)) == 1 and (hidden := why_hidden()):
            report += f"\n\nOther GPUs:{hidden}"
        if more is not None:
            compared = plans(found, more, setup.offload)
            report += f"\n\n{describe_another(*compared)}"
            answer += f"\n{verdict_on_another(*compared)}"
        return {"ui": show_report(report, answer), "result": (report, advised_config(found, stub))}
