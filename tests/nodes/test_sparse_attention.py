"""Core's Model Sparse Attention, known by the names of its functions, which are made here as the node does."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from parallel_backend.core.sparse_attention import SparseAttention
from parallel_backend.families import FAMILIES
from parallel_backend.families.own_class import adapters
from parallel_backend.families.own_class.family import own_class_family
from testing import mini
from tests.nodes.test_attention_choice import by_core, in_module

H3 = FAMILIES["minimax-h3"]
CONFIG = {"num_layers": 3, "num_single_layers": 2}
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
    full=("transformer_blocks.0", "transformer_blocks.2"),
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


def changes_of(module, options, family=H3, sigma=0.5, **arguments):
    options = {"sigmas": torch.tensor([sigma]), **options}
    return module("model.block_patches").block_changes(family, CONFIG, options, 1, "auto", arguments)


def of(module, override, blocks=None, **more):
    replaced = {} if blocks is None else {"dit": {("double_block", index): blocks for index in range(3)}}
    changes, left = changes_of(module, {"optimized_attention_override": override, "patches_replace": replaced}, **more)
    assert left["optimized_attention_override"] is None
    assert left["patches_replace"] == {}
    return changes


def test_its_settings_reach_the_ranks(module):
    patch = SimpleNamespace(**SETTINGS)
    assert of(module, override_of(patch)).sparse == EXPECTED
    assert of(module, override_of(patch), block_patch_of(patch)).sparse == EXPECTED
    off = SimpleNamespace(**SETTINGS | {"sink_conditioning": "off", "topk_ratio": 0.1, "dense_blocks": set()})
    assert of(module, override_of(off)).sparse == replace(EXPECTED, sinks="", kept=0.1, full=())


@pytest.mark.parametrize(("sigma", "sparse"), [(0.8, False), (0.75, True), (0.25, True), (0.2, False)])
def test_calls_outside_of_its_window_are_in_full(module, sigma, sparse):
    changes = of(module, override_of(SimpleNamespace(**SETTINGS)), sigma=sigma)
    assert (changes.sparse is not None) == sparse


def of_own_class(module, patch, blocks=None, sigma=0.5):
    options = {"sigmas": torch.tensor([sigma]), "optimized_attention_override": override_of(patch)}
    if blocks is not None:
        options["patches_replace"] = {"dit": {("double_block", index): blocks for index in range(3)}}
        assert module("model.block_patches").skipped_keys(options["patches_replace"]) == ({}, {})
    checkpoint = SimpleNamespace(family=own_class_family(mini.proven()), config={})
    return module("model.own_calls").sparse_attention(checkpoint, options, (torch.zeros(1, 4, 2, 2),), {}, object)


def test_blocks_are_named_in_every_list(module):
    found = of_own_class(module, SimpleNamespace(**SETTINGS))
    assert found.full == ("double_blocks.0", "double_blocks.2", "single_blocks.0", "single_blocks.2")
    assert (found.segments, found.grid) == ((), ())


def test_segments_of_a_class_come_with_the_settings(module, monkeypatch):
    segments, patch = ((5, "rest"), (16, "video")), SimpleNamespace(**SETTINGS | {"vsa": True})
    adapter = adapters.Adapter("", {}, segments=lambda *_: (segments, (1, 4, 4)))
    monkeypatch.setattr(adapters, "ADAPTERS", {mini.proven().kind: adapter})
    found = of_own_class(module, patch, block_patch_of(patch))
    assert (found.segments, found.grid, found.cubes) == (segments, (1, 4, 4), True)
    assert of_own_class(module, patch) is None
    assert of_own_class(module, patch, block_patch_of(patch), sigma=0.8) is None


def test_cubes_are_for_the_blocks_that_it_has_patched(module):
    """A model that was trained for cubes of its video sees no other sparse attention."""
    patch = SimpleNamespace(**SETTINGS | {"vsa": True, "topk_ratio": 0.1})
    assert of(module, override_of(patch)).sparse is None
    assert of(module, override_of(patch), block_patch_of(patch)).sparse == replace(EXPECTED, kept=0.1, cubes=True)


def test_the_kernel_below_it_is_that_of_calls_in_full(module):
    patch = SimpleNamespace(**SETTINGS)
    changes = of(module, override_of(patch, by_core("attention_sage")))
    assert (changes.attention, changes.sparse) == ("sage", EXPECTED)
    assert of(module, override_of(patch, override_of(patch))).sparse == EXPECTED
    other = by_core("attention_of_a_newer_comfyui")
    _, left = changes_of(module, {"optimized_attention_override": override_of(patch, other)})
    assert left["optimized_attention_override"] is other


def test_keyframes_come_before_references(module):
    """As in ComfyUI's sequence. The ranks have references first."""

    def video(frames, rows, columns):
        return torch.zeros(1, 24, frames, 2 * rows, 2 * columns)

    def sound(frames):
        return torch.zeros(1, 32, 2, frames)

    payload = {
        "keyframes": [{"latent": video(1, 3, 2), "audio_latent": sound(4), "resolved_frame_index": 0}],
        "refs": [
            {"kind": "video_audio", "ref_audio_t": 3, "audio_latent": sound(3), "latent": video(2, 1, 2)},
            {"kind": "audio", "ref_audio_t": 2, "audio_latent": sound(2)},
            {"kind": "image", "latent": video(1, 2, 1)},
        ],
    }
    changes = of(module, override_of(SimpleNamespace(**SETTINGS)), minimax_payload=payload)
    assert changes.sparse.references == ((16, 22), (22, 30), (0, 6), (6, 10), (10, 14), (14, 16))


@pytest.mark.parametrize("gate_compress", [False, True])
def test_the_node_finds_whether_a_block_has_vsas_gate(module, gate_compress):
    """It warns where there is none, and VSA goes on without it."""
    tensors = {"blocks.0.attn.qkv.weight": torch.empty(12, 4, device="meta")}
    if gate_compress:
        tensors["blocks.0.attn.to_gate_compress.weight"] = torch.empty(4, 4, device="meta")
    checkpoint = SimpleNamespace(family=H3, config={"gate_compress": gate_compress})
    block = module("model.native_names").NativeNames(checkpoint, tensors, "").at("blocks")[0]
    assert (block.attn.to_gate_compress is None) is not gate_compress
    with pytest.raises(AttributeError, match=r"blocks\.0\.attn\.other"):
        _ = block.attn.other
