"""What becomes of what a node can put on a MODEL, behind the loader or before Parallelize Model, is what its row says."""

import types

import pytest
import torch

from tests.nodes import rows
from tests.nodes.rows import COMPLETE, HARMLESS, PASSED, REFUSED, every, sample_function
from tests.support.stand_in_comfyui import ModelPatcher

KEY = "diffusion_model.double_blocks.0.img_attn.proj.weight"


def difference(patcher):
    return (torch.ones(patcher.model.state_dict()[KEY].shape),)


def hook():
    return types.SimpleNamespace(hook_ref=object())


def injection():
    return types.SimpleNamespace(inject=sample_function, eject=sample_function)


PUT = {  # setter -> its call
    "add_patches": lambda patcher: patcher.add_patches({KEY: difference(patcher)}),
    "add_hook_patches": lambda patcher: patcher.add_hook_patches(hook(), {KEY: difference(patcher)}),
    "add_callback": lambda patcher: patcher.add_callback("on_cleanup", sample_function),
    "add_callback_with_key": lambda patcher: patcher.add_callback_with_key("on_cleanup", "key", sample_function),
    "add_wrapper": lambda patcher: patcher.add_wrapper("outer_sample", sample_function),
    "add_wrapper_with_key": lambda patcher: patcher.add_wrapper_with_key("outer_sample", "key", sample_function),
    "set_additional_models": lambda patcher: patcher.set_additional_models("key", [ModelPatcher(None, None)]),
    "add_object_patch": lambda patcher: patcher.add_object_patch("model_sampling", sample_function),
    "set_attachments": lambda patcher: patcher.set_attachments("key", 1),
    "set_hook_mode": lambda patcher: patcher.set_hook_mode("maxspeed"),
    "add_weight_wrapper": lambda patcher: patcher.add_weight_wrapper(KEY, sample_function),
    "set_injections": lambda patcher: patcher.set_injections("key", [injection()]),
}
REACHING = ("patches", "hook_patches")
HELD = (*REACHING, "callbacks", "wrappers", "additional_models", "object_patches", "attachments", "hook_mode")


@every(rows.SETTERS)
def test_what_is_put_on_a_model(patcher, name, outcome):
    if outcome == REFUSED:
        with pytest.raises(ValueError, match=r"^model: "):
            PUT[name](patcher)
        return
    PUT[name](patcher)
    (held,) = (each for each in HELD if getattr(patcher, each))
    patcher.pre_run()
    assert (held in REACHING) == (outcome == PASSED)
    assert len(list(patcher.stub._deltas())) == (outcome == PASSED)


def test_what_is_put_inside_the_native_model_is_refused(patcher):
    for name in ("diffusion_model", "diffusion_model.double_blocks.0", "diffusion_model.forward"):
        with pytest.raises(ValueError, match=f"another '{name}'"):
            patcher.add_object_patch(name, sample_function)
    with pytest.raises(ValueError, match="computing in another dtype"):
        patcher.add_object_patch("manual_cast_dtype", torch.float16)


def test_a_loras_request_for_an_attention_kernel_is_left_out_and_told_once(module, patcher, monkeypatch):
    told = []
    monkeypatch.setattr(module("model.patcher"), "tell", told.append)
    for layer in range(2):
        patcher.add_object_patch(f"diffusion_model.blocks.{layer}.attn.comfy_attention", object())
    assert not patcher.object_patches
    assert told == ["this LoRA asks for an attention kernel, and is used with that of the MODEL"]


EVENTS = {  # callback -> what ComfyUI does when it is told
    "on_clone": lambda patcher: patcher.clone(),
    "on_load_after": lambda patcher: patcher.partially_load("cpu"),
    "on_detach_after": lambda patcher: patcher.detach(),
    "on_cleanup": lambda patcher: (patcher.pre_run(), patcher.cleanup()),
    "on_pre_run": lambda patcher: patcher.pre_run(),
    "on_prepare_state": lambda patcher: patcher.prepare_state(torch.zeros(1), {}),
    "on_apply_hooks": lambda patcher: patcher.apply_hooks(None),
    "on_register_all_hook_patches": lambda patcher: patcher.register_all_hook_patches(None, {}),
    "on_inject_model": lambda patcher: patcher.partially_load("cpu"),
    "on_eject_model": lambda patcher: (patcher.partially_load("cpu"), patcher.detach()),
}


@every(rows.CALLBACKS)
def test_callbacks_are_told_once(patcher, name, outcome):
    told = []
    patcher.add_callback_with_key(name, "key", lambda *arguments: told.append(arguments))
    if outcome == REFUSED:
        with pytest.raises(ValueError, match="MultiGPU CFG Split"):
            patcher.deepclone_multigpu()
        return
    bypass = "on_inject_model", "on_eject_model"
    if name in bypass:
        patcher.injections["a LoRA in bypass mode"] = [injection()]
    EVENTS[name](patcher)
    assert len(told) == 1
    assert told[0][0] is patcher


def test_reading_patched_weights_in_place_is_refused(patcher):
    with pytest.raises(ValueError, match="saving or extracting weights"):
        patcher.partially_load("cpu", force_patch_weights=True)


@every(rows.HOOK_TYPES)
def test_hook_types(patcher, name, outcome):
    for version in COMPLETE.values():
        assert (name in version["refused hooks"]) == (outcome == REFUSED)
    if name == "weight":
        patcher.add_hook_patches(hook(), {KEY: difference(patcher)})
        patcher.pre_run()
        assert len(list(patcher.stub._deltas())) == 1
        patcher.apply_hooks(None)
        assert patcher.stub._strengths() == (0.0,)


@every(rows.HOOK_TARGETS)
def test_a_hooks_patches_of_the_text_encoder_are_let_pass(patcher, name, outcome):
    key = KEY if name == "model" else "clip_l.transformer.text_model.encoder.layers.0.mlp.fc1.weight"
    unfit = {key: ("an unknown kind", (torch.ones(2, 2),))}
    if outcome == PASSED:
        with pytest.raises(ValueError, match="an unknown kind"):
            patcher.add_hook_patches(hook(), unfit)
    else:
        patcher.add_hook_patches(hook(), unfit)


MARK = {  # attribute of a ModelPatcher -> a value as a node puts it there
    "patches": lambda patcher: {KEY: [(1.0, difference(patcher), 1.0, None, None)]},
    "patches_uuid": lambda patcher: "a name",
    "hook_patches": lambda patcher: {object(): {KEY: [(1.0, difference(patcher), 1.0, None, None)]}},
    "injections": lambda patcher: {"key": []},
    "object_patches": lambda patcher: {"model_sampling": sample_function},
    "model_options": lambda patcher: {"transformer_options": {}, "sampler_cfg_function": sample_function},
    "attachments": lambda patcher: {"key": sample_function},
    "callbacks": lambda patcher: {kind: {"key": [sample_function]} for kind in rows.CALLBACKS},
    "wrappers": lambda patcher: {kind: {"key": [sample_function]} for kind in rows.WRAPPERS},
    "hook_mode": lambda patcher: "maxspeed",
    "weight_wrapper_patches": lambda patcher: {KEY: [sample_function]},
}


@every(rows.PATCHER_STATE)
def test_what_parallelize_model_carries_over(module, patcher, name, outcome):
    """From a MODEL of another loader: all that nodes have put on it."""
    source, carry_over = ModelPatcher(patcher.model, patcher.load_device), module("model.carry_over").carry_over
    if name in ("additional_models", "forced_hooks"):
        original = types.SimpleNamespace(clone=lambda: "its clone")
        setattr(source, name, {"key": [original]} if name == "additional_models" else original)
        carry_over(source, patcher)
        assert getattr(patcher, name) == ({"key": ["its clone"]} if name == "additional_models" else "its clone")
    elif outcome == REFUSED:
        setattr(source, name, MARK[name](patcher))
        with pytest.raises(ValueError, match=r"^model: "):
            carry_over(source, patcher)
    elif outcome == HARMLESS:
        before, value = getattr(patcher, name, None), object()
        setattr(source, name, value)
        carry_over(source, patcher)
        assert getattr(patcher, name, None) is before
    else:
        value = MARK[name](patcher)
        setattr(source, name, value)
        carry_over(source, patcher)
        assert getattr(patcher, name) == value


def test_a_hooks_patch_that_cannot_reach_the_ranks_is_not_carried_over(module, patcher):
    source = ModelPatcher(patcher.model, patcher.load_device)
    source.hook_patches = {object(): {KEY: [(1.0, ("set", (torch.ones(2, 2),)), 1.0, None, None)]}}
    with pytest.raises(ValueError, match=r"^model: "):
        module("model.carry_over").carry_over(source, patcher)


def test_copies_for_other_gpus_are_refused(module, patcher):
    source = ModelPatcher(patcher.model, patcher.load_device)
    source.set_additional_models("multigpu", [source])
    with pytest.raises(ValueError, match="MultiGPU CFG Split"):
        module("model.carry_over").carry_over(source, patcher)


@pytest.mark.parametrize("name", rows.OF_A_LOADER)
def test_options_of_a_loader(module, name):
    """With which a native loader has loaded the MODEL, as the MODEL notes it."""

    def load_diffusion_model(unet_path, model_options): ...

    load_diffusion_model.__module__, load_diffusion_model.__qualname__ = "comfy.sd", "load_diffusion_model"
    value = torch.bfloat16 if name == "dtype" else object()
    model = types.SimpleNamespace(cached_patcher_init=(load_diffusion_model, ("a file", {name: value})), object_patches={})
    native_source = module("model.loading.native_source").native_source
    if rows.MODEL_OPTIONS[name] == REFUSED:
        with pytest.raises(ValueError, match=name):
            native_source(model)
    else:
        assert (native_source(model).weight_dtype == "bf16") == (rows.MODEL_OPTIONS[name] == PASSED)
