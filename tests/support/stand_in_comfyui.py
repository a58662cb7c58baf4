"""What stands in for ComfyUI's modules, so that the pack's own modules can be imported and run without a ComfyUI.

It has what nodes/model and nodes/sampling touch, and behaves as ComfyUI does there: which callback is told when, which
method keeps what where. Names of wrappers and callbacks are those of a file of names (testing/comfyui/host_names.py).
"""

import importlib
import json
import logging
import sys
import types
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from testing.comfyui.host_names import NAMES

ROOT = Path(__file__).parents[2]
PACK = "pack_on_a_stand_in"
NEWEST = json.loads((NAMES / "comfyui-0.33.0.json").read_text(encoding="utf-8"))


@contextmanager
def pack() -> Iterator[Any]:
    """Context with `module(name)`: the pack's module nodes.<name>, whose ComfyUI is the stand-in."""
    package = types.ModuleType(PACK)
    package.__path__ = [str(ROOT)]
    nodes = types.ModuleType(f"{PACK}.nodes")  # without its __init__, which imports every node
    nodes.__path__ = [str(ROOT / "nodes")]
    with mock.patch.dict(sys.modules, stand_ins() | {PACK: package, nodes.__name__: nodes}):
        yield lambda name: importlib.import_module(f"{PACK}.nodes.{name}")


def stand_ins() -> dict[str, types.ModuleType]:
    """Module's name -> stand-in."""
    modules = {
        "patcher_extension": _patcher_extension(),
        "model_patcher": {
            "ModelPatcher": ModelPatcher,
            "create_model_options_clone": copied,
        },
        "samplers": {"Sampler": Sampler, "KSAMPLER": KSAMPLER, "CFGGuider": CFGGuider},
        "conds": {name: type(name, (), {}) for name in ("CONDRegular", "CONDNoiseShape", "CONDConstant", "CONDCrossAttn")},
        "model_management": {"is_device_cpu": lambda device: device.type == "cpu"},
        "weight_adapter": {"WeightAdapterBase": WeightAdapterBase, "LoRAAdapter": LoRAAdapter},
        "sd": {name: type(name, (), {}) for name in ("CLIP", "VAE")},
        "context_windows": {
            "IndexListContextHandler": type("IndexListContextHandler", (), {}),
            "IndexListContextWindow": type("IndexListContextWindow", (), {}),
            "IndexListCallbacks": types.SimpleNamespace(
                EVALUATE_CONTEXT_WINDOWS="evaluate_context_windows",
                COMBINE_CONTEXT_WINDOW_RESULTS="combine_context_window_results",
            ),
        },
        "model_base": {"BaseModel": type("BaseModel", (), {})},
        "utils": {"ProgressBar": type("ProgressBar", (), {}), "swap_scale_shift": None},
        "lora": {each.__name__: each for each in (calculate_weight, calculate_shape, pad_tensor_to_shape)},
        **{name: {} for name in ("float", "ops", "model_detection", "k_diffusion", "ldm")},
        **{
            name: {}
            for name in ("k_diffusion.sampling", "ldm.common_dit", "ldm.flux", "ldm.modules", "ldm.modules.attention")
        },
        "ldm.flux.model": {"Flux": NativeFlux},
    }
    found = {f"comfy.{name}": _module(f"comfy.{name}", contents) for name, contents in modules.items()}
    found["comfy"] = _module("comfy", {name: found[f"comfy.{name}"] for name in modules if "." not in name})
    for name, module in found.items():
        if name.count(".") > 1:
            setattr(found[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    utils = _module("comfy_execution.utils", {"get_executing_context": lambda: None})
    found |= {"comfy_execution": _module("comfy_execution", {"utils": utils}), utils.__name__: utils}
    found["folder_paths"] = _module("folder_paths", {})
    found["nodes"] = _module("nodes", {"NODE_CLASS_MAPPINGS": {}, "NODE_DISPLAY_NAME_MAPPINGS": {}})
    return found


def _module(name: str, contents: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(contents)
    return module


def _patcher_extension() -> dict[str, Any]:
    def names(kind: str) -> dict[str, str]:
        return {value.removesuffix("_after").upper(): value for value in NEWEST[kind]}

    def table(options: dict[str, Any], is_model_options: bool) -> dict[str, Any]:
        inner = options.setdefault("transformer_options", {}) if is_model_options else options
        return inner.setdefault("wrappers", {})

    def add_wrapper_with_key(kind, key, wrapper, options, is_model_options=False):
        table(options, is_model_options).setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def get_all_wrappers(kind, options, is_model_options=False):
        return [each for by_key in table(options, is_model_options).get(kind, {}).values() for each in by_key]

    return {
        "WrappersMP": type("WrappersMP", (), names("wrappers")),
        "CallbacksMP": type("CallbacksMP", (), names("callbacks")),
        "WrapperExecutor": Executor,
        "add_wrapper_with_key": add_wrapper_with_key,
        "get_all_wrappers": get_all_wrappers,
    }


class Executor:
    """ComfyUI's WrapperExecutor, as a wrapper gets it."""

    def __init__(self, class_obj: Any, wrappers: list[Any], idx: int):
        self.class_obj, self.wrappers, self.idx = class_obj, wrappers, idx

    def __call__(self, *_arguments: Any) -> str:
        return "all that is inside"


class NativeFlux:
    def forward(self):
        return WrapperExecutor  # noqa: F821 (by this name the pack knows a native model that runs wrappers)


class WeightAdapterBase:
    """Any kind of LoRA."""

    def __init__(self, loaded_keys, weights):
        self.loaded_keys, self.weights = loaded_keys, weights


class LoRAAdapter(WeightAdapterBase):
    """Without a third factor and DoRA's scale."""

    name = "lora"

    def product(self):
        up, down, alpha, *_ = self.weights
        return (1.0 if alpha is None else alpha / len(down)) * (up.flatten(1) @ down.flatten(1))


def calculate_weight(patches, weight, _key, original_weights=None):
    """With LoRAs and differences: what does not fit is left out, and only logged."""
    for strength, value, strength_model, offset, function in patches:
        if strength_model != 1.0:
            weight *= strength_model
        if isinstance(value, WeightAdapterBase) and value.weights[5] is not None:
            weight = pad_tensor_to_shape(weight, value.weights[5])
        if strength == 0.0:
            continue
        part = weight if offset is None else weight.narrow(*offset)
        try:
            added = value.product().reshape(part.shape) if isinstance(value, WeightAdapterBase) else value[0]
            part += (function or (lambda each: each))(strength * added.to(part.device))
        except RuntimeError as error:
            logging.error("ERROR %s", error)
    return weight


def calculate_shape(patches, weight, _key):
    """Of the weight that LoRAs have enlarged."""
    enlarging = (value.weights[5] for _, value, *_ in patches if isinstance(value, WeightAdapterBase))
    return next(filter(None, enlarging), weight.shape)


def pad_tensor_to_shape(tensor, shape):
    padded = torch.zeros(shape, device=tensor.device)
    padded[tuple(map(slice, tensor.shape))] = tensor
    return padded


def copied(value: Any) -> Any:
    """Copies of nested dicts and lists, with the same objects in them."""
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


class ModelPatcher:
    """ComfyUI's ModelPatcher, without weights."""

    def __init__(self, model, load_device, offload_device=None, size=0, weight_inplace_update=False):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.patches, self.object_patches, self.weight_wrapper_patches = {}, {}, {}
        self.attachments, self.additional_models, self.injections = {}, {}, {}
        self.callbacks, self.wrappers, self.hook_patches = {}, {}, {}
        self.model_options = {"transformer_options": {}}
        self.current_hooks, self.forced_hooks, self.hook_mode = None, None, None
        self.is_injected = self.skip_injection = False
        self.patches_uuid = uuid.uuid4()

    def tell(self, kind, *arguments):
        for callback in self.get_all_callbacks(kind):
            callback(*arguments)

    def get_all_callbacks(self, kind):
        return [each for by_key in self.callbacks.get(kind, {}).values() for each in by_key]

    def add_callback(self, kind, callback):
        self.add_callback_with_key(kind, None, callback)

    def add_callback_with_key(self, kind, key, callback):
        self.callbacks.setdefault(kind, {}).setdefault(key, []).append(callback)

    def add_wrapper(self, kind, wrapper):
        self.add_wrapper_with_key(kind, None, wrapper)

    def add_wrapper_with_key(self, kind, key, wrapper):
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        for target, value in patches.items():
            key, offset = (target, None) if isinstance(target, str) else target
            if key in self.model.state_dict():
                self.patches.setdefault(key, []).append((strength_patch, value, strength_model, offset, None))
        self.patches_uuid = uuid.uuid4()
        return list(patches)

    def add_hook_patches(self, hook, patches, strength_patch=1.0, strength_model=1.0):
        added = {key: [(strength_patch, value, strength_model, None, None)] for key, value in patches.items()}
        self.hook_patches[hook.hook_ref] = added
        self.patches_uuid = uuid.uuid4()
        return list(patches)

    def add_object_patch(self, name, value):
        self.object_patches[name] = value

    def set_attachments(self, key, attachment):
        self.attachments[key] = attachment

    def set_additional_models(self, key, models):
        self.additional_models[key] = models

    def set_injections(self, key, injections):
        self.injections[key] = injections

    def set_hook_mode(self, mode):
        self.hook_mode = mode

    def clone(self):
        clone = type(self)(self.model, self.load_device, self.offload_device)
        clone.callbacks, clone.patches, clone.injections = (
            copied(self.callbacks),
            copied(self.patches),
            copied(self.injections),
        )
        clone.hook_patches, clone.model_options = copied(self.hook_patches), copied(self.model_options)
        clone.patches_uuid = self.patches_uuid
        self.tell("on_clone", self, clone)
        return clone

    def pre_run(self):
        self.tell("on_pre_run", self)

    def prepare_state(self, timestep, model_options):
        self.tell("on_prepare_state", self, timestep, model_options)

    def cleanup(self):
        self.tell("on_cleanup", self)

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        self.load(device_to)

    def load(self, device_to=None):
        self.tell("on_load_after", self, device_to)
        self.inject_model()

    def detach(self, unpatch_all=True):
        self.eject_model()
        self.tell("on_detach_after", self, unpatch_all)

    def inject_model(self):
        raise AssertionError("there is nothing to inject into: the model is on its ranks")

    def eject_model(self):
        raise AssertionError("there is nothing to eject from: the model is on its ranks")

    def deepclone_multigpu(self, *_arguments, **_named):
        raise AssertionError("ComfyUI would load the file once more")

    def register_all_hook_patches(self, hooks, target_dict, model_options=None, registered=None):
        self.tell("on_register_all_hook_patches", self, hooks, target_dict, model_options, registered)

    def apply_hooks(self, hooks, transformer_options=None, force_apply=False):
        self.patch_hooks(hooks)
        self.tell("on_apply_hooks", self, hooks)


class Sampler:
    """Any of ComfyUI's samplers."""


class KSAMPLER(Sampler):
    def __init__(self, sampler_function, extra_options=None, inpaint_options=None):
        self.sampler_function = sampler_function
        self.extra_options, self.inpaint_options = extra_options or {}, inpaint_options or {}


class CFGGuider:
    def __init__(self, patcher):
        self.model_patcher, self.model_options, self.inner_model = patcher, patcher.model_options, patcher.model
        self.conds = {}


for _kind in (Sampler, KSAMPLER, CFGGuider):
    _kind.__module__ = "comfy.samplers"  # by which the pack knows ComfyUI's own
