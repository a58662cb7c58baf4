"""ComfyUI's own class of a file, as data that ranks build it from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy.model_base
import torch

from parallel_backend.checkpoints.limits import check_own_arguments
from parallel_backend.checkpoints.own_class import file_shapes
from parallel_backend.core.devices import device_kind
from parallel_backend.core.meta_parameters import meta_parameters
from parallel_backend.core.own_class import DTYPE, ROOT, OwnClass
from parallel_backend.core.setup import Conversion, TensorSizes
from parallel_backend.core.short_text import short
from parallel_backend.families import FAMILIES
from parallel_backend.families.base.step_inputs import Shapes
from parallel_backend.families.others import TO_COME, UNET, other_model
from parallel_backend.families.own_class.adapters import unstated
from parallel_backend.families.own_class.family import own_class_family

from ..native.native_call import class_arguments, native_config, on_meta
from ..patches.reach import is_plain
from .class_code import modules_named_by

HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def comfyui_folder() -> str:
    """OwnClass.folder."""
    return str(Path(comfy.model_base.__file__).resolve().parents[1])


def import_settings(device: str) -> tuple[tuple[str, str, bool], ...]:
    """OwnClass.settings of a rank on this kind of device. A rank imports ComfyUI once, for models and VAEs alike."""
    cpu = device_kind(device) == "cpu"
    return ("comfy.cli_args", "args.cpu", cpu), ("comfy.cli_args", "args.use_pytorch_cross_attention", True)


def has_family(shapes: Shapes, stated: Mapping[str, Any] | None) -> bool:
    """Whether a family computes the model that ComfyUI takes a file with these tensors for. True where it knows none."""
    try:
        config = native_config(on_meta(shapes), stated)
    except Exception:  # of any kind: ComfyUI's code may ask for what a damaged file has not
        return True
    kinds = {kind for family in FAMILIES.values() for kind in family.native_classes}
    return config is None or type(config).__name__ in kinds


def own_class(
    path: Path, devices: tuple[str, ...], unknown: ValueError, conversion: Conversion = (), enlarged: TensorSizes = ()
) -> OwnClass:
    """The class by which ComfyUI would compute this file, with tensors `enlarged` by a LoRA. `unknown`, the refusal of a
    file that no family takes, is raised if there is none that ranks can run: for sound, solids and tools, too."""
    shapes, stated = file_shapes(path, conversion)
    shapes |= dict(enlarged)
    other = other_model(shapes)
    if other is not None and other.what not in (TO_COME, UNET):
        raise unknown
    tensors = on_meta(shapes)
    try:
        config = native_config(tensors, stated)
        if config is None:
            raise unknown
        config.set_inference_dtype(torch.float32, None)
    except Exception:  # of any kind: ComfyUI's code may ask for what a damaged file has not
        raise unknown from None
    if entry := unstated(type(config).__name__, stated or {}):
        raise ValueError(
            f"model_name: the header of {short(path.name)} lacks its {entry}, which the model's own files have. Without "
            "it ComfyUI too would compute another model. Get the file from another source."
        )
    stated_arguments = {name: value for name, value in config.unet_config.items() if name in (stated or {})}
    check_own_arguments(short(path.name), stated_arguments, list(shapes.values()))
    try:
        with meta_parameters():
            native = config.get_model(tensors, "").diffusion_model
        renamed = {key: config.process_unet_state_dict({key: tensor}) for key, tensor in tensors.items()}
    except Exception:  # of any kind: ComfyUI's code may ask for what a damaged file has not, or a single tensor
        raise unknown from None
    kind = type(native)
    arguments = class_arguments(config.unet_config)
    unet = isinstance(native, comfy.model_base.UNetModel)
    if not kind.__module__.startswith(ROOT) or (other is not None and (other.what == UNET) != unet):
        raise unknown
    arguments = {
        name: f"{DTYPE}{str(value).removeprefix('torch.')}" if isinstance(value, torch.dtype) else value
        for name, value in arguments.items()
    }
    if not is_plain(arguments):
        raise unknown
    keys = {next(iter(names)): key for key, names in renamed.items() if len(names) == 1}
    own = OwnClass(
        kind=type(config).__name__,
        folder=comfyui_folder(),
        module=kind.__module__,
        name=kind.__qualname__,
        arguments=json.dumps(arguments),
        settings=import_settings(devices[0]),
        imports=modules_named_by(kind),
        keys=tuple((name, key) for name, key in keys.items() if name != key),
        halves=tuple(HALVES[dtype] for dtype in config.supported_inference_dtypes if dtype in HALVES),
        video=config.latent_format.latent_dimensions == 3,
        unet=unet,
    )
    try:
        own_class_family(own)  # kept for the file that is opened next
    except Exception as error:  # of any kind: its code is not known
        raise ValueError(
            f"model_name: {path.name}: ComfyUI's class {own.name} cannot be built on ranks ({type(error).__name__}: "
            f"{error}). Load it with ComfyUI's own loader, on one GPU."
        ) from error
    return own
