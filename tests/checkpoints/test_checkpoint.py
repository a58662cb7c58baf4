"""Files that cannot be read are refused by the name of the widget, and another dtype is the rounded weights."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.checkpoint import open_own_class
from parallel_backend.checkpoints.single_file import contents_of
from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.own_class.built.built_class import built_class
from testing import mini
from tests.support.one_rank import OneRank

pytestmark = pytest.mark.threads


def truncate(path, file):
    path.write_bytes(file.read_bytes()[:-1000])


BROKEN_FILES = {
    "missing.safetensors": (None, "does not exist"),
    "cut.safetensors": (truncate, "damaged or incomplete"),
    "empty.safetensors": (lambda path, _: path.write_bytes(b""), "damaged or incomplete"),
    "text.safetensors": (lambda path, _: path.write_text("<html>not found</html>"), "damaged or incomplete"),
    "pickle.ckpt": (lambda path, _: torch.save({"a": torch.zeros(1)}, path), "Pickled checkpoints are never opened"),
    "renamed.pt": (lambda path, file: path.write_bytes(file.read_bytes()), "not a .safetensors, .sft or .gguf file"),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_damaged_and_foreign_files_are_refused_by_name(mini_file, tmp_path, name):
    make, message = BROKEN_FILES[name]
    path = tmp_path / name
    if make is not None:
        make(path, mini_file)
    with pytest.raises(ValueError, match=f"^model_name: {name}.*{message}"):
        open_own_class(path, mini.proven())


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"lora_up.weight": torch.zeros(2)}, "not a diffusion transformer .*It is a LoRA.* .*lora_up.weight"),
        ({"decoder.conv_in.weight": torch.zeros(2)}, "It is a VAE: use Load VAE"),
        ({"genre_embedder.weight": torch.zeros(2)}, "a.safetensors is ACE-Step, an audio model"),
        ({}, "Its first keys: none"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, tensors, words):
    save_file(tensors, path := tmp_path / "a.safetensors")
    assert re.search(words, str(contents_of(path).refusal()))


def without(tensors, *endings):
    return {key: value for key, value in tensors.items() if not key.endswith(endings)}


BROKEN_TENSORS = {
    "a missing tensor": (lambda t: without(t, "double_blocks.1.img_mlp.2.weight"), "lacks double_blocks.1"),
    "several missing": (lambda t: without(t, "txt_mlp.0.bias"), "and 2 more"),
    "bytes": (lambda t: t | {"txt_in.weight": torch.zeros(128, 24, dtype=torch.uint8)}, "has txt_in.weight as U8"),
    "a scale of 8-bit values that nobody knows": (
        lambda t: t | {"txt_in.weight": t["txt_in.weight"].to(torch.float8_e4m3fn), "txt_in.weight_scale_2": torch.ones(1)},
        "has txt_in.weight_scale_2, which",
    ),
}


@pytest.mark.parametrize("case", BROKEN_TENSORS)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_files_that_cannot_be_run_are_refused_by_name(mini_file, tmp_path, case, prefix):
    edit, message = BROKEN_TENSORS[case]
    save_file({prefix + key: value for key, value in edit(load_file(mini_file)).items()}, tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match=f"^model_name: broken.safetensors.*{message}"):
        open_own_class(tmp_path / "broken.safetensors", mini.proven())


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_another_dtype_is_the_rounded_weights(mini_file, mini_model, dtype, torch_dtype):
    rounded = OneRank(mini_file, dtype).stage.model.state_dict()
    for name, value in mini_model.state_dict().items():
        assert torch.equal(rounded[name], value.to(torch_dtype)), name


@pytest.mark.parametrize("stages", [1, 2])
def test_fp8_is_a_quarter_in_memory_and_close(pools, mini_file, mini_model, stages):
    model, given = pools.mini(mini_file, Degrees(pipe=stages), "fp8_e4m3fn"), mini.inputs()
    whole = sum(p.nbytes for p in mini_model.parameters())
    assert sum(model.weight_bytes) < 0.35 * whole
    error = mini.relative(model.predict(ModelCall(*given), lambda: None), mini.reference(mini_model, *given))
    assert 1e-4 < error < 0.1


def test_torchs_generator_stays_where_it_is(mini_file):
    built_class.cache_clear()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    open_own_class(mini_file, mini.proven())
    assert torch.equal(before, torch.get_rng_state()), "a sampler's noise would be another one"
