"""Whether a run is cut into bands, for all that a node can put around its sampler, its guidance and its model."""

import types
from functools import partial, update_wrapper

import pytest
import torch

from parallel_backend.core.degrees import Degrees
from tests.nodes import rows
from tests.nodes.rows import COMPUTED, every, sample_function
from tests.support.stand_in_comfyui import KSAMPLER, CFGGuider, Executor


@every(rows.WRAPPERS_IN_BANDS)
def test_wrappers_in_bands(module, why_not_banded, name, outcome):
    options = {"transformer_options": {"wrappers": {name: {"key": [sample_function]}}}}
    found = why_not_banded(options)
    if name == "sampler_sample":
        found = module("sampling.eligibility").why_wrapped(Executor(None, [print, sample_function], 0))
    assert (found is not None) == (outcome == "no bands")


def test_wrappers_of_the_pack_and_those_outside_leave_bands_alone(module):
    why_wrapped, ours = module("sampling.eligibility").why_wrapped, module("model.run.step_cache").note_shapes
    pipefusion = module("sampling.pipefusion").PipeFusion(2, 1, True, True)
    assert why_wrapped(Executor(None, [sample_function, pipefusion, ours], 1)) is None
    assert "wrapper of the sampler" in why_wrapped(Executor(None, [pipefusion, ours, sample_function], 0))


def test_a_run_with_a_wrapper_inside_is_whole_and_says_why(module, sampling, monkeypatch):
    pipefusion = module("sampling.pipefusion").PipeFusion(2, 1, True, True)
    cut = types.SimpleNamespace(rows=(0, 1), patching=types.SimpleNamespace(video=False))
    monkeypatch.setattr(type(pipefusion), "_cut", lambda *_arguments: cut)
    monkeypatch.setattr(type(pipefusion), "_in_bands", lambda *_arguments: pytest.fail("the wrapper was left out"))
    model = types.SimpleNamespace(degrees=Degrees(pipe=2), on_ranks=False, pool=types.SimpleNamespace(notes=()))
    executor = Executor(None, [pipefusion, sample_function], 0)
    assert pipefusion._sample(model, sampling(), executor) == "all that is inside"
    assert "wrapper of the sampler" in pipefusion.last.reason


def test_a_node_that_is_told_of_each_evaluation_gets_no_bands(patcher, why_not_banded):
    patcher.add_callback_with_key("on_prepare_state", "key", sample_function)
    assert "is notified of each evaluation" in why_not_banded()


@every(rows.MODEL_OPTIONS)
def test_model_options_in_bands(why_not_banded, name, outcome):
    """An unknown function. Those that are known to work on a part are in the tables of known_local.py."""
    value = {} if name == "transformer_options" else sample_function
    reason = why_not_banded({name: value}, mask=torch.ones(1, 1, 8, 8))
    assert (reason is not None) == (name in rows.MODEL_OPTIONS_IN_BANDS)
    assert reason is None or outcome == COMPUTED


@every(rows.HOOK_SCOPES)
def test_hooks_of_every_scope_are_left_to_comfyui_and_end_bands(why_not_banded, name, outcome):
    assert outcome == COMPUTED
    assert "hooks" in why_not_banded(entry={"hooks": types.SimpleNamespace(scope=name)})


@every(rows.ENTRIES)
def test_entries_of_a_conditioning_in_bands(why_not_banded, name, outcome):
    reason = why_not_banded(entry={name: {}})
    assert (reason is not None) == (name in rows.ENTRIES_IN_NO_BANDS)
    assert reason is None or f"its own {name}" in reason
    assert reason is None or outcome == COMPUTED


def named(name, operation=None):
    """A function of this name, whose closure has the variable that the pack looks at."""

    def function():
        return operation

    module, _, function.__qualname__ = name.partition(".")
    function.__module__ = f"comfy.k_diffusion.{module}" if module in ("sampling", "uni_pc") else module
    return function


LATENT_OPERATION = "nodes_latent.LatentApplyOperationCFG.execute.<locals>.pre_cfg_function"


@pytest.mark.parametrize(
    ("function", "is_known", "whole"),
    [
        (named("nodes_cfg.CFGNorm.execute.<locals>.cfg_norm"), True, False),
        (named("nodes_apg.APG.execute.<locals>.pre_cfg_function"), True, True),
        (named("nodes_sag.SelfAttentionGuidance.execute.<locals>.post_cfg_function"), False, False),
        (named(LATENT_OPERATION, named("nodes_latent.LatentOperationSharpen.execute.<locals>.sharpen")), True, True),
        (named(LATENT_OPERATION, named("a_pack.operation")), False, True),
    ],
)
def test_guidance_in_bands(module, function, is_known, whole):
    known = module("sampling.known_local")
    assert (known.is_known_guidance(function), known.looks_at_the_whole(function)) == (is_known, whole)


@pytest.mark.parametrize(
    ("file", "kind", "in_bands", "whole"),
    [
        ("samplers", "CFGGuider", True, False),
        ("nodes_perpneg", "Guider_PerpNeg", True, True),
        ("nodes_train", "TrainGuider", False, False),
    ],
)
def test_guiders_in_bands(module, sampling, file, kind, in_bands, whole):
    found = sampling()
    found.guider.__class__ = type(kind, (CFGGuider,), {"__module__": file})
    eligibility = module("sampling.eligibility")
    assert (eligibility.why_not_banded(found) is None) == in_bands
    assert eligibility.needs_the_whole(found) == whole


@every(rows.SAMPLERS_IN_BANDS)
def test_samplers_of_comfyui_in_bands(module, name, outcome):
    reason = module("sampling.known_samplers").why_global(KSAMPLER(named(name)))
    assert (reason is None) == (outcome == rows.PIXEL_WISE)


def shifted(_offset):
    """As a preset of bleh's."""


class Centred:
    """A sampler that is no function."""


def wrapping(sampler):
    """As Detail Daemon's."""
    return KSAMPLER(named("detail_daemon_node.detail_daemon_sampler"), {"dds_wrapped_sampler": sampler})


EULER = named("sampling.sample_euler")
WITH_NOISE = KSAMPLER(EULER, {"noise_sampler": print})


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        (wrapping(KSAMPLER(EULER)), None),
        (
            wrapping(KSAMPLER(EULER, {"noise_sampler": print})),
            "detail_daemon_sampler wraps a sampler that has its own noise",
        ),
        (KSAMPLER(update_wrapper(partial(shifted, 0.1), EULER)), "shifted is not one of ComfyUI's samplers"),
        (wrapping(KSAMPLER(Centred())), "Centred is not one of ComfyUI's samplers"),
    ],
)
def test_samplers_of_other_packs_in_bands(module, sampler, reason):
    """What they wrap decides, whatever a function says that it is called."""
    assert module("sampling.known_samplers").why_global(sampler) == reason
