"""Parallel VAE Encode and Decode give what VAE Encode and VAE Decode give. What cannot be cut is computed by ComfyUI, and
the node says so. All classes of VAEs are on ranks in threads in tests/rank/test_vae.py."""

import pytest

from .conftest import asked, mostly_full

pytestmark = pytest.mark.comfyui

LIMIT = 1e-5
"""fp32 rounding, as a part of the largest value."""
NODE = "7"
IN_PARTS = (
    *("decode auto, on the model's ranks", "decode Flux, no post_quant_conv", "decode Flux.2", "encode SD, odd size"),
    *("decode once room is made", "decode written into", "decode after that", "encode Wan 2.1", "decode Wan 2.1"),
    *("decode Wan, cancelled", "decode Qwen-Image Layered, three ranks", "encode HunyuanVideo", "decode HunyuanVideo"),
    *("encode LTX-Video 0.9", "decode LTX-Video 0.9", "decode with noise", "encode MiniMax H3 in tiles"),
    "decode MiniMax H3 in tiles",
)
IN_DEFAULT = (
    *("decode auto, on the model's ranks", "encode SD, odd size", "decode once room is made", "decode written into"),
    *("decode after that", "encode Wan 2.1", "decode Wan, cancelled", "decode Qwen-Image Layered, three ranks"),
    *("decode with noise", "decode MiniMax H3 in tiles"),
)
WHOLE = {
    "decode without ranks": "there is only one device for it",
    "decode too little memory": "a device has less than the",
    "decode patched": "another node has changed this VAE",
    "decode with another VAE's layer in it": "another node has changed this VAE",
    "decode noisy": "this VAE cannot be cut: its bands differ from the whole by",
    "decode TAESD": "a VAE of this kind (TAESD) cannot be cut",
    "encode too small": "the image has at most 8 rows or columns, too few for 2 ranks with 8 each",
}


@pytest.fixture(scope="module")
def found(request, inside):
    return inside.run("vae", skip={*IN_PARTS} - {*IN_DEFAULT} - asked(request, "case"))[0]


def check(got, limit=LIMIT):
    """Its words on the node."""
    assert got["difference"] <= limit
    assert got["alike"]
    assert got["spread"] > 0.02
    ((node, text),) = got["said"]
    assert node == NODE
    return text


@pytest.mark.parametrize("case", mostly_full(IN_PARTS, IN_DEFAULT))
def test_parts_equal_comfyuis_node(found, case):
    text = check(found[case])
    what = "tiles" if "tiles" in case else f"{3 if 'three' in case else 2} parts"
    assert text.startswith(f"{'Encoded' if case.startswith('encode') else 'Decoded'} in {what} on cpu, cpu")


def test_a_quantised_vae_is_cut_with_expanded_weights(found):
    """ComfyUI rounds the inputs of its layers to int8, which ranks do not."""
    got = found["decode MiniMax H3, int8"]
    assert check(got, 5e-3).startswith("Decoded in tiles on cpu, cpu")


@pytest.mark.parametrize("case", WHOLE)
def test_what_cannot_be_cut_is_computed_whole_and_the_node_says_so(found, case):
    did = "Encoded" if case.startswith("encode") else "Decoded"
    assert check(found[case], 0.0).startswith(f"{did} whole by ComfyUI, because {WHOLE[case]}")


def test_models_on_the_ranks_make_way(found):
    assert found["decode once room is made"]["asked"] == [["cpu", True]]


def test_what_a_node_writes_into_a_vae_is_decoded_with(found):
    assert found["decode written into"]["changed"] > 0.01


def test_the_model_on_the_ranks_stays_as_it_was(found):
    assert found["model after decoding"] == 0


def test_wrong_inputs_are_named(found):
    said = "ValueError: samples: the latent has 16 channels, this VAE needs 4"
    assert found.error("wrong channels").startswith(said)
    assert found.error("wrong devices").startswith("ValueError: devices: 'tpu' is not a device of this machine")


def test_a_vae_is_not_kept_alive(found):
    assert found["dropped"] is True
