"""Parallelize Model behind ComfyUI's loaders gives Parallel DiT Loader's MODEL, and leaves the native one as it was."""

import pytest

pytestmark = pytest.mark.comfyui

LIMIT = 2e-5
"""fp32 rounding of a whole run: weights in a file's map may begin at other addresses, for which a CPU has other kernels."""
SAID = {
    "written": "a node has changed the weights of ComfyUI's model (double_blocks.1.img_mlp.0.weight)",
    "other_forward": "a node has replaced 'single_blocks.0' of ComfyUI's model by parallelize.main.<locals>.other_forward",
    "GGUF, loader not known": "model: this MODEL's file is unknown",
    "made_elsewhere": "model: this MODEL is made by parallelize.main.<locals>.written, which this pack does not know",
    "second_file": "model: its loader adds weights of a second file (vace.safetensors)",
    "no multiple": "gpus is 3, but parallel_config has ulysses_degree 2, for 2 or a multiple of it",
}


@pytest.mark.parametrize("case", ["nothing", "two LoRAs", "wrappers and options", "merge"])
def test_nodes_before_and_behind_it_do_what_they_do_behind_the_loader(found, case):
    assert found[case] == {"behind": 0.0, "ahead": 0.0, "native loaded": False}


def test_load_checkpoint(found):
    checkpoint = found["CheckpointLoaderSimple"]
    assert (checkpoint["behind"], checkpoint["mapped"]) == (0.0, 1.0)
    assert checkpoint["native"] <= LIMIT


def test_a_gguf_loaders_file_is_the_one_that_the_graph_names(found):
    assert found["GGUF"] == {"listed": True, "behind": 0.0}


def test_mode_pipefusion_is_apply_pipefusion(found):
    got = found["pipefusion"]
    assert got["behind"] == got["replaced"] == 0.0 < got["apart"]


def test_the_native_model_is_unloaded_needs_no_memory_and_is_right_afterwards(found):
    got = found["memory"]
    assert got["loaded"][0] > 0 == got["loaded"][1]
    assert got["mapped"] == [0.0, 1.0]
    assert got["again"] <= LIMIT
    assert found["fp8"] == ["fp8_e4m3fn", "bf16", "0.0"]


@pytest.mark.parametrize("case", SAID)
def test_what_cannot_be_is_refused_by_name(found, case):
    assert found.error(case).startswith("ValueError: ")
    assert SAID[case] in found.error(case)
