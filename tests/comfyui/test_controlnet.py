"""Apply ControlNet with ComfyUI's own ControlNets: the parallel MODEL gives what ComfyUI's own model gives with the same."""

import itertools
from collections.abc import Iterator

import pytest

from testing import mini
from testing.comfyui import sd3_file
from tests.comfyui.conftest import mostly_full, unselected

pytestmark = pytest.mark.comfyui

LIMIT = 5e-5
KINDS = ("Flux, picture", "Flux, latent", "SD3", "SD3.5", "Qwen", "Qwen, two frames")
SETTINGS = ("cfg 1", "cfg 3, some steps", "two", "two calls a step")
MODES = ("pipe 2", "all warm-up", "ulysses 2")
PIPELINED = ("Flux, latent", "SD3", "Qwen")
SAMPLERS = ("euler", "heun", "euler_ancestral")
CALLS = (0, 3)
"""Of the ControlNet in a run: a whole one, and one of a band."""
UNFIT = "control_net: this ControlNet does not fit the model: "
SAID = {
    "other width": "ValueError: control_net: ComfyUI's class Flux does not run with this ControlNet (The size of tensor a",
    "other size": f"ValueError: {UNFIT}an output is [",
    "post_input": "ValueError: model: model patch 'post_input' (",
    "attn1": "ValueError: model: model patch 'attn1_patch' (",
    "Fun": "ValueError: model_name: qwen-image.safetensors cannot run on ranks: ComfyUI itself computes with its 'process_i",
}


def equal_rows() -> Iterator[pytest.param]:
    """One kind has two settings in bands and one over tokens in the default tier. The others, which decide what a ControlNet
    gives out and for which blocks, have one setting in bands."""
    for kind, setting, mode in itertools.product(KINDS, SETTINGS, MODES):
        first = kind == PIPELINED[0] and ((setting, mode) in (("two", "all warm-up"), ("cfg 3, some steps", "ulysses 2")))
        default = first or (setting, mode) == ("two calls a step", "all warm-up")
        yield pytest.param(kind, setting, mode, marks=() if default else pytest.mark.full)


def pipelined_rows() -> Iterator[pytest.param]:
    """How samplers call a ControlNet is the same for every kind."""
    for kind, sampler in itertools.product(PIPELINED, SAMPLERS):
        default = (kind, sampler) == (PIPELINED[0], SAMPLERS[0])
        yield pytest.param(kind, sampler, marks=() if default else pytest.mark.full)


@pytest.fixture(scope="module")
def found(request, inside, base):
    models = base / "models" / "diffusion_models"
    mini.save(mini.random_model(mini.IN_COMFYUI | {"guidance": True}), models / "flux.safetensors")
    inside.run("small_files", names=["qwen-image"])
    sd3_file.write(models / "sd3.safetensors")
    ours = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    modes = {item.callspec.params["mode"] for item in ours if "mode" in item.callspec.params} | {"displaced"}
    skip = unselected(request, "kind", "setting", "mode", of=itertools.product(KINDS, SETTINGS, MODES))
    skip += [
        f"{kind}, {setting}, native"
        for kind, setting in itertools.product(KINDS, SETTINGS)
        if kind != PIPELINED[0] and {f"{kind}, {setting}, {mode}" for mode in MODES} <= set(skip)
    ]
    skip += unselected(request, "kind", "sampler", of=itertools.product(PIPELINED, SAMPLERS))
    skip += [f"{PIPELINED[0]}, {each}, displaced" for each in unselected(request, "displaced", of=zip(SETTINGS))]
    skip += [f"{each}, pipelined without warm-up" for each in unselected(request, "cold", of=zip(PIPELINED))]
    skip += unselected(request, "ending", "call", of=itertools.product(("cancel in call", "error in call"), CALLS))
    return inside.run("controlnet", modes=sorted(modes), skip=skip)[0]


def equal_to_native(found, measured, kind, setting, mode):
    native, got = found[f"{kind}, {setting}, native"], found[f"{kind}, {setting}, {mode}"]
    assert native.get("finite"), native
    assert native["moved"] > 0.05
    assert "error" not in got, got
    measured(f"ControlNet, largest difference to ComfyUI's own model, {kind}", got["difference"])
    assert got["difference"] <= LIMIT


@pytest.mark.parametrize(("kind", "setting", "mode"), list(equal_rows()))
def test_equals_the_native_model_with_the_same_controlnet(found, measured, kind, setting, mode):
    equal_to_native(found, measured, kind, setting, mode)


@pytest.mark.parametrize("displaced", mostly_full(SETTINGS, ["cfg 3, some steps"]))
def test_displaced_patches_that_only_warm_up_equal_the_native_model(found, measured, displaced):
    equal_to_native(found, measured, PIPELINED[0], displaced, "displaced")


@pytest.mark.parametrize(("kind", "sampler"), list(pipelined_rows()))
def test_pipefusion_repeats_and_stays_close_to_the_exact_run(found, measured, kind, sampler):
    got = found[f"{kind}, {sampler}"]
    assert got.get("finite"), got
    measured(f"ControlNet, relative error of PipeFusion, {kind}, {sampler}", got["error"])
    measured(f"ControlNet, the same without it, {kind}, {sampler}", got["error without"])
    assert got["repeat"] == 0.0
    assert 0 < got["error"] < 0.5 * got["moved"]


@pytest.mark.parametrize("cold", mostly_full(PIPELINED, PIPELINED[:1]))
def test_pipefusion_without_warm_up_repeats(found, cold):
    got = found[f"{cold}, pipelined without warm-up"]
    assert got.get("finite"), got
    assert got["repeat"] == 0.0


@pytest.mark.parametrize("call", mostly_full(CALLS, CALLS[1:]))
@pytest.mark.parametrize("ending", ["cancel in call"])
def test_cancel_ends_the_run_and_the_next_one_is_as_ever(found, ending, call):
    got = found[f"{ending}, {call}"]
    assert got.get("ended"), got
    assert got["raised"].startswith("InterruptProcessingException")
    assert got["threads"] == []
    assert got["next"] == 0.0


@pytest.mark.parametrize("call", mostly_full(CALLS, CALLS[1:]))
@pytest.mark.parametrize("ending", ["error in call"])
def test_an_error_inside_the_controlnet_ends_the_run_and_is_the_one_shown(found, ending, call):
    got = found[f"{ending}, {call}"]
    assert got.get("ended"), got
    assert got["raised"] == "RuntimeError: the ControlNet's own error"
    assert got["threads"] == []
    assert got["next"] == 0.0


@pytest.mark.parametrize("what", [*SAID, *(f"{what}, pipelined" for what in ("other width", "other size", "Fun"))])
def test_what_cannot_reach_the_ranks_is_refused_by_name(found, what):
    got = found[f"refusal {what}"]
    assert isinstance(got, dict), got
    assert got["error"].startswith(SAID[what.removesuffix(", pipelined")]), got


def test_a_refusal_leaves_the_ranks_working(found):
    assert found["after the refusals"].get("finite"), found["after the refusals"]
