"""The trained mini video model: it shows what it is asked for, and bands are as close to whole calls as they should be."""

import functools

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file
from torch import nn

from benchmarks.harness import mini_video, moving_digits
from parallel_backend.core.degrees import Degrees
from parallel_backend.quickstart.mini_wan import MiniWan
from testing import mini

pytestmark = pytest.mark.threads
STEPS, CFG = 8, 2.0
LEAST, MOST = {"rows": 53.0, "frames": 63.0}, 75.0
"""dB. Bands as they are have 56 and 66 (60 where stale keys and values are not corrected); whole calls would be equal."""


@pytest.fixture(scope="module")
def videos(pools):
    """`videos(degrees, bands, along)`: two, and what they were asked to show."""
    prompts, noise = mini_video.requests(2)

    @functools.cache
    def make(pipe=1, bands=0, along="rows"):
        model = pools.load(mini_video.WEIGHTS, Degrees(pipe=pipe), own=mini_video.proven())
        return mini_video.sample(model, prompts, noise, STEPS, bands, CFG, along)[0], prompts

    return make


@torch.inference_mode()
def test_its_class_is_wans():
    tensors = {name: each.float() for name, each in load_file(mini_video.WEIGHTS).items()}
    ours, theirs = (
        MiniWan(nn),
        diffusers.WanTransformer3DModel(num_attention_heads=2, text_dim=16, ffn_dim=384, num_layers=4),
    )
    ours.load_state_dict(tensors)
    theirs.load_state_dict(convert_wan_transformer_to_diffusers(tensors))
    prompts, x = mini_video.requests(2)
    context, times = moving_digits.encode_prompts(prompts), torch.tensor([700.0, 40.0])
    expected = theirs(x, times, context, return_dict=False)[0]
    assert mini.relative(ours(x, times, context), expected) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize("along", ["rows", "frames"])
def test_bands_of_a_video_are_close_to_whole_calls(videos, along):
    (whole, prompts), (banded, _) = videos(), videos(2, 4, along)
    found = mini_video.judge(banded, whole, prompts)
    assert LEAST[along] <= found["psnr_db"] <= MOST
