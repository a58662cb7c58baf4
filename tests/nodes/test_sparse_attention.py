"""Core's Model Sparse Attention, known by the names of its functions, which are made here as the node does."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from parallel_backend.core.sparse_attention import SparseAttention
from parallel_backend.own_class.adapters import adapters
from parallel_backend.own_class.built.built_class import built_class
from testing import mini
from tests.nodes.test_attention_choice import in_module

SETTINGS = {
    "tau": 1.3,
    "topk_ratio": 0.0,
    "extra_tokens": 256,
    "vsa": False,
    "sigma_start": 0.75,
    "sigma_end": 0.25,
    "min_tokens": 12288,
    "dense_blocks": {0, 2, 9},
    "sink_conditioning": "exact_kv_and_rows",
}
EXPECTED = SparseAttention(
    tau=1.3,
    extra_tokens=256,
    least_tokens=12288,
    full=("double_blocks.0", "double_blocks.2", "single_blocks.0", "single_blocks.2"),
    sinks="exact_kv_and_rows",
)


def override_of(patch, previous=None):
    def override(func, *args):
        return (patch, previous, func, args)

    return in_module(override, "comfy_extras.nodes_sparse_attention", "make_attention_override.<locals>.override")


def block_patch_of(patch):
    def block_patch(args, extra):
        return (patch, args, extra)

    return in_module(block_patch, "comfy_extras.nodes_sparse_attention", "make_h3_block_patch.<locals>.block_patch")


def of(module, override, blocks=None, sigma=0.5):
    """Settings of a call of ComfyUI's own class, whose blocks have the node's patch `blocks`."""
    options = {"sigmas": torch.tensor([sigma]), "optimized_attention_override": override}
    if blocks is not None:
        options["patches_replace"] = {"dit": {("double_block", index): blocks for index in range(3)}}
        assert module("model.patches.block_patches").skipped_keys(options["patches_replace"]) == ({}, {})
    checkpoint = SimpleNamespace(built=built_class(mini.proven()), config={})
    return module("model.call.own_calls").sparse_attention(checkpoint, options, (torch.zeros(1, 4, 2, 2),), {}, object)


def test_its_settings_reach_the_ranks(module):
    """Blocks that stay dense are named in every list."""
    patch = SimpleNamespace(**SETTINGS)
    assert of(module, override_of(patch)) == EXPECTED
    assert of(module, override_of(patch), block_patch_of(patch)) == EXPECTED
    off = SimpleNamespace(**SETTINGS | {"sink_conditioning": "off", "topk_ratio": 0.1, "dense_blocks": set()})
    assert of(module, override_of(off)) == replace(EXPECTED, sinks="", kept=0.1, full=())


@pytest.mark.parametrize(("sigma", "sparse"), [(0.8, False), (0.75, True), (0.25, True), (0.2, False)])
def test_calls_outside_of_its_window_are_in_full(module, sigma, sparse):
    assert (of(module, override_of(SimpleNamespace(**SETTINGS)), sigma=sigma) is not None) == sparse


def test_segments_of_a_class_come_with_the_settings(module, monkeypatch):
    """Cubes are for the blocks that the node has patched: a model trained for cubes sees no other sparse attention."""
    segments, patch = ((5, "rest"), (16, "video")), SimpleNamespace(**SETTINGS | {"vsa": True, "topk_ratio": 0.1})
    adapter = adapters.Adapter("", {}, segments=lambda *_: (segments, (1, 4, 4)))
    monkeypatch.setattr(adapters, "ADAPTERS", {mini.proven().kind: adapter})
    found = of(module, override_of(patch), block_patch_of(patch))
    assert found == replace(EXPECTED, kept=0.1, cubes=True, segments=segments, grid=(1, 4, 4))
    assert of(module, override_of(patch)) is None
    assert of(module, override_of(patch), block_patch_of(patch), sigma=0.8) is None
