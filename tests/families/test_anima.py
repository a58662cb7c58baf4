"""Anima's adapter, which ComfyUI's process runs: its values equal ComfyUI's in tests/comfyui."""

import pytest
import torch
from safetensors.torch import load_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.checkpoints.reader import text_values
from parallel_backend.families.anima import ADAPTER, LEAST_TOKENS, through_adapter
from testing.cases import anima

(CASE,) = anima.CASES


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return CASE.save(CASE.model(), tmp_path_factory.mktemp("anima") / "anima.safetensors")


@pytest.fixture(scope="module")
def weights(file):
    checkpoint = open_checkpoint(file)
    return lambda prefix: text_values(checkpoint, prefix, torch.float32, torch.device("cpu"))


def test_the_adapter_is_no_weight_of_the_ranks(file):
    checkpoint = open_checkpoint(file)
    assert checkpoint.family.name == "anima"
    assert not any(source.key.startswith(ADAPTER) for source in checkpoint.key_map.values())
    assert checkpoint.text_keys("") == [key for key in load_file(file) if key.startswith(ADAPTER)]


@pytest.mark.parametrize("tokens", [3, LEAST_TOKENS + 8])
def test_text_is_padded_with_zeros_to_the_least_length(weights, tokens):
    ids, factors = torch.arange(tokens)[None], torch.full((1, tokens, 1), 0.5)
    text = torch.randn(1, 5, anima.SMALL["source_dim"])
    plain = through_adapter({}, weights, text, ids)
    assert plain.shape == (1, max(tokens, LEAST_TOKENS), anima.SMALL["target_dim"])
    assert plain[:, :tokens].abs().sum(-1).min() > 0
    assert not plain[:, tokens:].any()
    assert torch.equal(through_adapter({}, weights, text, ids, t5xxl_weights=factors), plain / 2)


def test_text_without_t5s_tokens_is_for_the_blocks_already(weights):
    text = torch.randn(1, 5, anima.SMALL["target_dim"])
    assert through_adapter({}, weights, text) is text
