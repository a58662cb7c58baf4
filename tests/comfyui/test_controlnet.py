"""Apply ControlNet with ComfyUI's own ControlNets: the parallel MODEL gives what ComfyUI's own model gives with the same."""

import pytest

from testing import mini
from testing.comfyui import sd3_file
from tests.comfyui.conftest import asked

pytestmark = pytest.mark.comfyui

LIMIT = 5e-5
CASES = (
    ("Flux, latent", "two", "all warm-up"),
    ("SD3.5", "two calls a step", "all warm-up"),
    ("Qwen, two frames", "two calls a step", "all warm-up"),
    pytest.param("Flux, latent", "cfg 3, some steps", "ulysses 2", marks=pytest.mark.full),
    pytest.param("Flux, latent", "cfg 3, some steps", "displaced", marks=pytest.mark.full),
)
"""Kind of ControlNet, what is applied, mode. A kind decides what a ControlNet gives out and for which blocks."""
UNFIT = "control_net: this ControlNet does not fit the model: "
SAID = {
    "other width": "ValueError: control_net: ComfyUI's class Flux does not run with this ControlNet (The size of tensor a",
    "other size": f"ValueError: {UNFIT}an output is [",
    "post_input": "ValueError: model: model patch 'post_input' (",
    "attn1": "ValueError: model: model patch 'attn1_patch' (",
    "Fun": "ValueError: model_name: qwen-image.safetensors cannot run on ranks: ComfyUI itself computes with its 'process_i",
}


@pytest.fixture(scope="module")
def found(request, inside, base):
    models = base / "models" / "diffusion_models"
    mini.save(mini.random_model(mini.IN_COMFYUI | {"guidance": True}), models / "flux.safetensors")
    sd3_file.write(models / "sd3.safetensors")
    return inside.run("controlnet", cases=sorted(asked(request, "kind", "setting", "mode")))[0]


@pytest.mark.parametrize(("kind", "setting", "mode"), CASES)
def test_equals_the_native_model_with_the_same_controlnet(found, kind, setting, mode):
    got = found[f"{kind}, {setting}, {mode}"]
    assert got.get("finite"), got
    assert got["moved"] > 0.05
    assert got["difference"] <= LIMIT


def test_pipefusion_repeats_and_stays_close_to_the_exact_run(found):
    got = found["pipelined"]
    assert got.get("finite"), got
    assert got["repeat"] == 0.0
    assert 0 < got["relative"] < 0.5 * got["moved"]


@pytest.mark.parametrize("what", [*SAID, "other width, pipelined"])
def test_what_cannot_reach_the_ranks_is_refused_by_name(found, what):
    assert found.error(f"refusal {what}").startswith(SAID[what.removesuffix(", pipelined")])


def test_a_refusal_leaves_the_ranks_working(found):
    assert found["after the refusals"].get("finite"), found["after the refusals"]
