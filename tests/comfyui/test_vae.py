"""Parallel VAE Decode gives what VAE Decode gives; what cannot be cut is decoded by ComfyUI, and the node says so."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.comfyui.conftest import mostly_full, unselected

pytestmark = pytest.mark.comfyui

LIMIT = 1e-5
"""fp32 rounding; pixels are between 0 and 1."""
NODE = "7"
IN_BANDS = (
    "auto, on the model's ranks",
    "auto, after another model was loaded",
    "SD, real width",
    "Flux, no post_quant_conv, batch 2",
    "Flux.2, batch 2",
    "a latent with one frame",
    "cancelled",
    "room is made",
    "three ranks, batch 3",
    "written into",
    "after that",
    "Wan 2.1",
    "Wan 2.1, columns, batch 2, three ranks",
    "Qwen-Image, batch 2",
    "Qwen-Image Layered",
    "Wan 2.2",
    "Wan, cancelled",
    "MiniMax H3",
    "MiniMax H3, one frame, batch 2, three ranks",
)
IN_FULL = (
    *("auto, after another model was loaded", "SD, real width", "a latent with one frame", "three ranks, batch 3"),
    *("Wan 2.1, columns, batch 2, three ranks", "Qwen-Image, batch 2", "MiniMax H3, one frame, batch 2, three ranks"),
)
WHOLE = {
    "no ranks": "there is only one device for it",
    "too little memory": "a device has less than the",
    "too few rows": "the latent has 1 rows and columns at most, too few for 2 ranks",
    "changed": "another node has changed this VAE",
    "patched": "another node has changed this VAE",
    "another VAE's patch in its weights": "another node has changed this VAE",
    "TAESD": "a VAE of this kind (TAESD) cannot be cut",
}


@pytest.fixture(scope="module")
def ran(request, inside):
    """(results by case, what the process and its ranks printed) of one run for all tests of this file."""
    skip = {*unselected(request, "case", of=zip(IN_BANDS))} & {*IN_FULL}
    return inside.run("vae", skip=skip)


@pytest.fixture(scope="module")
def found(ran):
    return ran[0]


@pytest.mark.parametrize("case", mostly_full(IN_BANDS, [case for case in IN_BANDS if case not in IN_FULL]))
def test_bands_equal_vae_decode(found, measured, case):
    assert "error" not in found[case], found[case]
    measured(f"Parallel VAE Decode, largest difference, {case}", found[case]["difference"])
    assert found[case]["difference"] <= LIMIT
    assert found[case]["alike"]
    assert found[case]["spread"] > 0.05
    assert found[case]["clamped"] < 0.1
    ((node, text),) = found[case]["said"]
    assert node == NODE
    what = "tiles" if "H3" in case else f"{3 if 'three' in case else 2} bands"
    assert text.startswith(f"Decoded in {what} on cpu, cpu")


def test_a_quantised_vae_is_cut_with_expanded_weights(found, measured):
    """ComfyUI rounds the inputs of its layers to int8, which ranks do not."""
    got = found["MiniMax H3, int8"]
    assert "error" not in got, got
    measured("Parallel VAE Decode, largest difference, MiniMax H3 in int8", got["difference"])
    assert got["difference"] <= 5e-3
    assert got["alike"]
    assert got["said"][0][1].startswith("Decoded in tiles on cpu, cpu")


@pytest.mark.parametrize("case", WHOLE)
def test_what_cannot_be_cut_is_decoded_whole_and_the_node_says_so(found, case):
    assert "error" not in found[case], found[case]
    assert found[case]["difference"] == 0
    assert found[case]["alike"]
    ((node, text),) = found[case]["said"]
    assert node == NODE
    assert text.startswith(f"Decoded whole by ComfyUI, since {WHOLE[case]}")


def test_models_on_the_ranks_make_way(found):
    assert found["room is made"]["asked"] == [["cpu", True]]


def test_a_change_by_another_node_would_have_been_lost(found):
    assert found["what the change does"] > 0.01
    assert found["written into"]["changed"] > 0.01


def test_the_model_on_the_ranks_stays_as_it_was(found):
    assert found["model after decoding"] == 0
    assert found["another model"] > 0


def test_wrong_inputs_are_named(found):
    said = "ValueError: samples: the latent has 16 channels, this VAE needs 4"
    assert found["wrong channels"]["error"].startswith(said)
    assert found["wrong devices"]["error"].startswith("ValueError: devices: 'tpu' is no device of this machine")


def test_a_vae_is_not_kept_alive(found):
    assert found["dropped"] is True


def test_in_a_running_comfyui(ran, base, server):
    """The file that the script left: Load VAE, both nodes, the same picture."""
    prompt = {
        "1": {"class_type": "VAELoader", "inputs": {"vae_name": "random.safetensors"}},
        "2": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 80, "batch_size": 2}},
        "3": {"class_type": "VAEDecode", "inputs": {"samples": ["2", 0], "vae": ["1", 0]}},
        "4": {
            "class_type": "ParallelVAEDecode",
            "inputs": {"samples": ["2", 0], "vae": ["1", 0], "devices": "cpu,cpu"},
        },
        "5": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "whole"}},
        "6": {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "bands"}},
    }
    outcome = server.run(prompt)
    assert outcome.status == "success", outcome.error
    pictures = [np.asarray(Image.open(io.BytesIO(image))).astype(int) for image in outcome.images]
    assert [picture.shape for picture in pictures] == [(80, 64, 3)] * 4
    assert np.abs(pictures[0] - pictures[2]).max() <= 1  # one level: rounding to 8 bits
    assert np.abs(pictures[1] - pictures[3]).max() <= 1
    assert pictures[0].std() > 5
