"""Parallel Checkpoint Loader gives what Load Checkpoint gives, and leaves the transformer's weights to the ranks."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from testing.comfyui import sd3_file
from tests.comfyui import standins

pytestmark = pytest.mark.comfyui

LIMIT = 2e-5
"""fp32 rounding of a whole run, as in test_parity.py."""
PREFIX = "model.diffusion_model."


@pytest.fixture(scope="module")
def found(inside, base):
    folder = base / "models" / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    clip = {f"text_encoders.clip_l.transformer.{key}": value for key, value in standins.clip().items()}
    vae = {f"first_stage_model.{key}": value for key, value in standins.vae(channels=16).items()}
    # For the text encoder of the file. Its table of positions has more bytes than all the rest.
    alone = sd3_file.write(folder / "transformer.safetensors", 4096, standins.CLIP_WIDTH + 1280, side=160)
    save_file(vae, folder / "vae.safetensors")
    transformer = {PREFIX + key.removeprefix(PREFIX): value for key, value in load_file(alone).items()}
    save_file(transformer | clip | vae, folder / "tiny.safetensors")
    layers = [key.removesuffix(".weight") for key in transformer if ".joint_blocks." in key and key.endswith("qkv.weight")]
    fp8 = {f"{layer}.weight": transformer[f"{layer}.weight"].to(torch.float8_e4m3fn) for layer in layers}
    marks = {f"{PREFIX}scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for layer in layers:
        marks |= {f"{layer}.scale_weight": torch.ones(()), f"{layer}.scale_input": torch.full((), 0.5)}
    save_file(transformer | clip | vae | fp8 | marks, folder / "scaled.safetensors")
    result, _ = inside.run("all_in_one")
    result["sizes"] = [sum(value.nbytes for value in part.values()) for part in (transformer, clip | vae)]
    return result


def test_the_transformer_is_not_read_in_comfyuis_process(found):
    transformer, others = found["sizes"]
    assert transformer > 1.2 * others
    assert 0.9 * others < found["bytes"]["read"] < 1.05 * others  # the edges lie in pages with other tensors
    assert found["bytes"]["left"] == 0


@pytest.mark.parametrize("name", ["tiny", "scaled"])
def test_clip_and_vae_are_load_checkpoints(found, name):
    """In fp32; in fp8 with the marks and input scales of the first scaled files."""
    got = found[f"{name}: CLIP and VAE"]
    assert got["text"] == got["picture"] == 0.0
    assert got["kinds"] == [True, 16] and got["spread"] > 0.05


def test_the_model_is_load_checkpoints(found):
    assert found["model"] <= LIMIT


def test_parallel_dit_loader_lists_such_files_and_takes_their_transformer(found):
    assert found["in Parallel DiT Loader"] is True


def test_what_is_no_all_in_one_file_is_refused_by_the_inputs_name(found):
    said = {name: found.error(name) for name in ("transformer alone", "vae alone", "not there")}
    assert said["transformer alone"].startswith("ValueError: ckpt_name: transformer.safetensors has neither a text encoder")
    assert said["vae alone"].startswith("ValueError: ckpt_name: vae.safetensors is not a diffusion transformer")
    assert said["not there"].startswith("ValueError: ckpt_name: 'nowhere.safetensors' is not in models/checkpoints")
