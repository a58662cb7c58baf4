"""LoRAs on a MODEL whose weights are on ranks: what is sent, what is left out, and that the user's MODEL stays as it was."""

import copy
import types

import pytest
import torch

from tests.support.stand_in_comfyui import LoRAAdapter

PROJ, OTHER = (f"diffusion_model.double_blocks.{block}.img_attn.proj.weight" for block in (0, 1))
QKV, FIRST = "diffusion_model.double_blocks.0.img_attn.qkv.weight", "diffusion_model.img_in.weight"
RANK = 2


def lora(rows, columns, seed=0, reshape=None, of_file=()):
    g = torch.Generator().manual_seed(seed)
    factors = torch.randn(rows, RANK, generator=g), torch.randn(RANK, columns, generator=g)
    return LoRAAdapter(set(of_file), (*factors, None, None, None, reshape))


@pytest.fixture
def width(patcher):
    return patcher.model.state_dict()[PROJ].shape[0]


@pytest.fixture
def told(module, monkeypatch):
    """Lines on the node."""
    lines = []
    monkeypatch.setattr(module("ui.node_text"), "say", lines.append)
    return lines


def with_lora(model, patches, strength=1.0):
    """As ComfyUI's loaders put it on."""
    clone = model.clone()
    clone.add_patches(patches, strength)
    return clone


def state(model):
    """All that a later sampling run reads."""
    stub = model.stub
    return (
        copy.copy(model.patches),
        model.patches_uuid,
        copy.copy(model.injections),
        stub,
        stub.setup,
        stub.checkpoint,
        model.model,
    )


def sums(model, key):
    """What the ranks add to the weight, in all."""
    deltas = [each for each in model.stub.weights.deltas(model.patches) if f"diffusion_model.{each.key}" == key]
    return sum(each.scale * (each.up if each.down is None else each.up @ each.down) for each in deltas)


def bypass(adapters, strength=1.0):
    """ComfyUI's injection of a LoRA in bypass mode: adapter by layer."""

    class BypassInjectionManager:
        def __init__(self):
            self.adapters = {layer: (adapter, strength) for layer, adapter in adapters.items()}
            self.hooks = [types.SimpleNamespace(adapter=adapter) for adapter in adapters.values()]

        def injections(self):
            def inject(_patcher):
                return self

            return [types.SimpleNamespace(inject=inject, eject=inject)]

    return BypassInjectionManager().injections()


def test_one_lora_and_then_two(patcher, width):
    first, second = lora(width, width), lora(width, width, seed=1)
    before = state(patcher)
    one = with_lora(patcher, {PROJ: first}, 0.5)
    of_one = state(one)
    both = with_lora(one, {PROJ: second, OTHER: second}, -1.0)
    assert torch.allclose(sums(one, PROJ), 0.5 * first.product())
    assert torch.allclose(sums(both, PROJ), 0.5 * first.product() - second.product())
    assert torch.allclose(sums(both, OTHER), -second.product())
    assert state(one) == of_one and state(patcher) == before
    assert len({patcher.patches_uuid, one.patches_uuid, both.patches_uuid}) == 3, "ranks know patches by this name"


def test_layers_of_another_size_are_left_out(patcher, width, told):
    narrow = lora(width, width // 2)
    patched = with_lora(patcher, {PROJ: lora(width, width), OTHER: narrow, (QKV, (0, width, width)): narrow, "clip": narrow})
    assert list(patched.patches) == [PROJ]
    assert told == ["Parallel DiT: 2 of 3 layers of this LoRA do not fit this model and are left out"]
    whole = with_lora(patcher, {PROJ: lora(width, width)})
    assert torch.equal(sums(patched, PROJ), sums(whole, PROJ))


def test_a_lora_for_another_model_is_refused(patcher, width, told):
    with pytest.raises(
        ValueError, match=f"this LoRA is for another model: none of its 2 layers fits .*is \\[{width}, {width}\\]"
    ):
        with_lora(patcher, {PROJ: lora(width, width // 2), OTHER: (torch.ones(3),)})
    assert told == []


def test_a_lora_that_is_added_layer_by_layer_is_not_refused(patcher, width, told):
    """As some packs do it: the adapter tells how many tensors its file has."""
    patched = patcher.clone()
    for key, columns in ((PROJ, width), (OTHER, width // 2)):
        patched.add_patches({key: lora(width, columns, of_file=range(20))})
    assert list(patched.patches) == [PROJ]
    assert told == [
        "Parallel DiT: double_blocks.1.img_attn.proj.weight of this LoRA does not fit this model and is left out"
    ]


def test_a_layers_second_patch_is_for_the_weight_that_the_first_one_enlarges(module, patcher, width, told):
    channels = patcher.model.state_dict()[FIRST].shape[1]
    small, large = lora(width, channels), lora(width, 2 * channels, reshape=[width, 2 * channels])
    added = [(FIRST, (1.0, each, 1.0, None, None)) for each in (small, large, small, large)]
    assert module("model.lora.left_out").fitting(patcher.stub.weights, added, {}) == [True, True, False, True]
    assert told == ["Parallel DiT: 1 of 4 layers of this LoRA do not fit this model and are left out"]


def test_a_lora_in_bypass_mode_beside_another(module, patcher, width):
    """The weights get both, and the MODEL that it was put on has neither."""
    before, layer = state(patcher), PROJ.removesuffix(".weight")
    plain, in_bypass = lora(width, width), lora(width, width, seed=1)
    patched = with_lora(patcher, {PROJ: plain})
    patched.set_injections("bypass_lora", bypass({layer: in_bypass}, 0.5))
    patches = module("model.lora.bypass").bypass_patches(patched.injections)
    [delta] = patched.stub.weights.deltas(patches)
    assert torch.allclose(delta.scale * delta.up @ delta.down, 0.5 * in_bypass.product())
    assert torch.equal(sums(patched, PROJ), plain.product()) and state(patcher) == before
    for unfit in (lora(width, width // 2), lora(width, 2 * width, reshape=[width, 2 * width])):
        with pytest.raises(ValueError, match=r"a LoRA in bypass mode for double_blocks.*, which has a different"):
            patcher.clone().set_injections("bypass_lora", bypass({layer: unfit}))
