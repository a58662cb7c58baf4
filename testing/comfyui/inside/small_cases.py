"""Files of small models (small_models.py), and ComfyUI's detection of models smaller than published ones."""

import pkgutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import comfy
import torch
from boot import ksampler
from small_models import detected, latent, prompts, write


def sample(model, name: str) -> torch.Tensor:
    """Of the small model's own prompts."""
    return ksampler(model, prompts(name), latent(name), steps=2)


@contextmanager
def small(name: str) -> Iterator[None]:
    """Context in which models/diffusion_models has the small model's file, and ComfyUI takes it for that model."""
    with detecting(detected(name)):
        write(name)
        yield


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
