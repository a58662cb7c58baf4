"""A MODEL whose file is replaced: all that this process reads of it is the file of the prompt's beginning."""

import os

import pytest
import torch

from testing import mini

KEY = "diffusion_model.double_blocks.0.img_attn.proj.weight"


@pytest.fixture
def replaced(patcher, mini_file, tmp_path):
    """`replaced()` puts other weights at the path of the MODEL's file. The file is another one when the test has ended."""
    kept = tmp_path / "kept.safetensors"
    os.link(mini_file, kept)

    def replace():
        other = mini.save(mini.random_model(seed=1), tmp_path / "other.safetensors")
        os.replace(other, mini_file)

    yield replace
    os.replace(kept, mini_file)


def test_the_file_of_a_prompt_is_that_of_its_first_run(module, patcher, replaced, monkeypatch):
    prompt = ["one"]
    monkeypatch.setattr(module("model.call.diffusion_model"), "present_prompt", lambda: prompt[0])
    patcher.pre_run()
    before, controls, names = patcher.stub.checkpoint, patcher.stub.controls_here, patcher.stub.double_blocks
    value = patcher.patch_weight_to_device(KEY, return_weight=True).clone()
    replaced()
    patcher.pre_run()
    assert patcher.stub.checkpoint is before
    with pytest.raises(ValueError, match="has changed on disk while it was in use"):
        names.state_dict()
    prompt[0] = "two"
    patcher.pre_run()
    assert patcher.stub.checkpoint.file_state != before.file_state
    assert patcher.stub.controls_here is not controls
    assert not torch.equal(patcher.patch_weight_to_device(KEY, return_weight=True), value)
    assert patcher.stub.double_blocks.state_dict()
