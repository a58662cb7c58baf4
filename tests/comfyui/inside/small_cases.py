"""Conditioning of small files that small_files.py writes, and ComfyUI's detection of models smaller than published ones.

For each case there is `<name>.safetensors` in models/diffusion_models, and the conditioning in `<name>.inputs.safetensors`
of the base directory: tensors `positive.*`, `negative.*` and `latent`, lists of tensors as `<name>/<index>`, a tensor that
is an object's attribute as `<name>.<attribute>`, other values as JSON, in which {"tensor": name} stands for a tensor. Of a
nested latent `companion` is the second part; `mask` and `mask_companion` are its masks.
"""

import json
import pkgutil
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import comfy
import torch
from boot import BASE, ksampler
from safetensors import safe_open


def read(name: str):
    """(positive, negative, latent, settings) of a case."""
    with safe_open(BASE / f"{name}.inputs.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
        settings = json.loads(file.metadata()["settings"])
    prompts = []
    for sign in ("positive", "negative"):
        extras = with_tensors(settings["extras"], tensors)
        for key, value in tensors.items():
            if not key.startswith(f"{sign}.") or key == f"{sign}.text":
                continue
            extra, _, index = key.removeprefix(f"{sign}.").partition("/")
            extra, _, attribute = extra.partition(".")
            value = SimpleNamespace(**{attribute: value}) if attribute else value
            extras[extra] = [*extras.get(extra, []), value] if index else value
        prompts.append([[tensors[f"{sign}.text"], extras]])
    if "companion" not in tensors:
        return *prompts, tensors["latent"], settings
    from comfy.nested_tensor import NestedTensor

    latent = {"samples": NestedTensor((tensors["latent"], tensors["companion"]))}
    if "mask" in tensors:
        latent["noise_mask"] = NestedTensor((tensors["mask"], tensors["mask_companion"]))
    return *prompts, latent, settings


def with_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A value of the settings, with the tensors that it names in their places."""
    if isinstance(value, list):
        return [with_tensors(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    return (
        tensors[value["tensor"]] if "tensor" in value else {key: with_tensors(item, tensors) for key, item in value.items()}
    )


def sample(model, name: str) -> torch.Tensor:
    positive, negative, latent, settings = read(name)
    return ksampler(model, (positive, negative), latent, cfg=settings["cfg"], scheduler=settings["scheduler"], steps=2)


@contextmanager
def detecting(entries: dict):
    """ComfyUI's model detection finds these entries of a unet_config, whatever the file has.
    With an "image_model" they are all of it.

    Those under "classes" are by class of its supported_models: sizes by which that class is told from others, or which it
    takes for granted. Those under "modules" are further arguments of classes of layers, by their full names; those under
    "values" are other values of its constants.
    """
    detect, sizes = comfy.model_detection.detect_unet_config, entries.get("classes", {})
    modules, values = entries.get("modules", {}), entries.get("values", {})
    entries = {name: value for name, value in entries.items() if name not in ("classes", "modules", "values")}

    def detect_small(*arguments, **keywords):
        found = detect(*arguments, **keywords)
        return None if found is None and "image_model" not in entries else (found or {}) | entries

    comfy.model_detection.detect_unet_config = detect_small
    try:
        with ExitStack() as stack:
            for name, told in modules.items():
                stack.enter_context(patch(name, partial(pkgutil.resolve_name(name), **told)))
            for name, value in values.items():
                stack.enter_context(patch(name, value))
            for name, told in sizes.items():
                if (kind := getattr(comfy.supported_models, name, None)) is not None:  # an older ComfyUI may lack it
                    granted = {entry: value for entry, value in told.items() if entry in kind.unet_extra_config}
                    others = {entry: value for entry, value in told.items() if entry not in granted}
                    stack.enter_context(patch.object(kind, "unet_config", kind.unet_config | others))
                    stack.enter_context(patch.object(kind, "unet_extra_config", kind.unet_extra_config | granted))
            yield
    finally:
        comfy.model_detection.detect_unet_config = detect
