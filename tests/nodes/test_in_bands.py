"""Whether a run is cut into bands, for all that a node can put around its sampler, its guidance and its model."""

import types

import pytest
import torch

from parallel_backend.core.degrees import Degrees
from tests.nodes import rows
from tests.nodes.rows import COMPUTED, every
from tests.support.stand_in_comfyui import KSAMPLER, CFGGuider, Executor


def sample_function(*_arguments):
    """What a node has put there."""


def test_a_plain_sampling_runs_in_bands(why_not_banded):
    assert why_not_banded() is None


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
    assert "around the sampler" in why_wrapped(Executor(None, [pipefusion, ours, sample_function], 0))


def test_a_run_with_a_wrapper_inside_is_whole_and_says_why(module, sampling, monkeypatch):
    pipefusion = module("sampling.pipefusion").PipeFusion(2, 1, True, True)
    cut = types.SimpleNamespace(rows=(0, 1), patching=types.SimpleNamespace(video=False))
    monkeypatch.setattr(type(pipefusion), "_cut", lambda *_arguments: cut)
    monkeypatch.setattr(type(pipefusion), "_in_bands", lambda *_arguments: pytest.fail("the wrapper was left out"))
    model = types.SimpleNamespace(degrees=Degrees(pipe=2), on_ranks=False, pool=types.SimpleNamespace(notes=()))
    executor = Executor(None, [pipefusion, sample_function], 0)
    assert pipefusion._sample(model, sampling(), executor) == "all that is inside"
    assert "around the sampler" in pipefusion.last.reason


def test_a_node_that_is_told_of_each_evaluation_gets_no_bands(patcher, why_not_banded):
    patcher.add_callback_with_key("on_prepare_state", "key", sample_function)
    assert "is told of each evaluation" in why_not_banded()


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


def named(name, operation=None, rescaling_scale=1.0):
    """A function of this name, whose closure has the variables that the pack looks at."""

    def function():
        return operation, rescaling_scale

    module, _, function.__qualname__ = name.partition(".")
    function.__module__ = f"comfy.k_diffusion.{module}" if module in ("sampling", "uni_pc") else module
    return function


SHARPEN = "nodes_latent.LatentOperationSharpen.execute.<locals>.sharpen"
MASKS = ("nodes_differential_diffusion.DifferentialDiffusion.execute.<locals>.<lambda>",)


@every(rows.GUIDANCE_IN_BANDS)
def test_guidance_of_comfyui_in_bands(module, name, outcome):
    known, function = module("sampling.known_local"), named(name, operation=named(SHARPEN))
    if name in MASKS:
        assert (name in known.PIXEL_WISE_MASKS) == (outcome == rows.PIXEL_WISE)
        return
    assert known.is_known_guidance(function) == (outcome in (rows.PIXEL_WISE, rows.WHOLE))
    assert known.looks_at_the_whole(function) == (outcome == rows.WHOLE)


def test_guidance_that_calls_an_unknown_function_is_unknown(module):
    function = named("nodes_latent.LatentApplyOperationCFG.execute.<locals>.pre_cfg_function", named("a_pack.operation"))
    assert not module("sampling.known_local").is_known_guidance(function)


def test_skip_layer_guidance_without_rescaling_is_pixel_wise(module):
    function = named("nodes_slg.SkipLayerGuidanceDiT.execute.<locals>.post_cfg_function", rescaling_scale=0.0)
    assert not module("sampling.known_local").looks_at_the_whole(function)


@every(rows.GUIDERS_IN_BANDS)
def test_guiders_of_comfyui_in_bands(module, sampling, name, outcome):
    file, _, kind = name.partition(".")
    found = sampling()
    found.guider.__class__ = type(kind, (CFGGuider,), {"__module__": file})
    eligibility = module("sampling.eligibility")
    assert (eligibility.why_not_banded(found) is not None) == (outcome == rows.NO_BANDS)
    assert eligibility.needs_the_whole(found) == (outcome == rows.WHOLE)


@every(rows.SAMPLERS_IN_BANDS)
def test_samplers_of_comfyui_in_bands(module, name, outcome):
    reason = module("sampling.known_samplers").why_global(KSAMPLER(named(name)))
    assert (reason is None) == (outcome == rows.PIXEL_WISE)
