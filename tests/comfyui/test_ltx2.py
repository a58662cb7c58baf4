"""LTX-2 in a real ComfyUI: the MODEL gives what ComfyUI's own gives, for the video and for its sound."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from testing.quantised import quantise_blocks

pytestmark = [pytest.mark.comfyui, pytest.mark.full]

LIMIT = 2e-5
"""Of a difference, in the latents' units."""
NAME, NOTE = "ltx-2.3", ".comfy_quant"
CASES = (("guidance", "stages"), ("all in one in fp8", "stages"), ("guides", "ulysses"), ("image", "all warm-up"))


def save_all_in_one(base) -> None:
    """As Lightricks' fp8 files: the layers' formats in the header, a scale of the weight and of the input for each."""
    path = base / "models" / "diffusion_models" / f"{NAME}.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    state = {f"model.diffusion_model.{key}": value for key, value in quantise_blocks(load_file(path), "fp8")[0].items()}
    layers = [key.removesuffix(NOTE) for key in state if key.endswith(NOTE)]
    assert any("connector" in layer for layer in layers), "ComfyUI's process reads these"
    for layer in layers:
        del state[layer + NOTE]
        state[f"{layer}.input_scale"] = torch.full((), 0.5)
    state |= {key: torch.ones(4, 4) for key in ("audio_vae.decoder.conv_in.conv.weight", "vocoder.conv_pre.weight")}
    noted = {"_quantization_metadata": json.dumps({"layers": {layer: {"format": "float8_e4m3fn"} for layer in layers}})}
    save_file(state, path.with_name(f"{NAME}-fp8.safetensors"), metadata | noted)


@pytest.fixture(scope="module")
def found(inside, base):
    inside.run("small_files", names=[NAME])
    save_all_in_one(base)
    return inside.run("ltx2", name=NAME, cases=CASES)[0]


@pytest.mark.parametrize(("what", "mode"), CASES)
def test_it_equals_the_native_model(found, what, mode):
    native = found[f"{what}, native"]
    assert 0.1 < native["largest"] < 1000
    got = found[f"{what}, {mode}"]
    assert got["whole because"] == [None] * (mode == "all warm-up")
    assert math.isfinite(got["difference"])
    assert got["difference"] <= (5e-5 if "fp8" in what else LIMIT)


def test_a_wrapper_that_only_a_parents_forward_runs_is_refused(found):
    assert "a wrapper around the diffusion model" in found.error("wrapper")


def test_a_file_whose_header_was_lost_is_refused(found):
    assert "header of lost.safetensors lacks its rope_type" in found.error("lost header")
