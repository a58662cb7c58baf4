"""Opens a model's file by ComfyUI's rules: its detection, its conversions, and its own class as data for ranks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_base
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.limits import check_own_arguments
from parallel_backend.checkpoints.open_model import checkpoint_of
from parallel_backend.checkpoints.other_models import NOT_RUN, UNET
from parallel_backend.checkpoints.single_file import Contents, contents_of, refusals
from parallel_backend.core.devices import device_kind
from parallel_backend.core.meta_parameters import meta_parameters
from parallel_backend.core.own_class import DTYPE, ROOT, OwnClass
from parallel_backend.core.setup import TensorSizes
from parallel_backend.core.short_text import short
from parallel_backend.own_class.adapters.adapters import unstated

from ..native.native_call import class_arguments, is_plain, native_config, on_meta
from .class_code import modules_named_by
from .diffusers_layout import conversion_of

HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
NAMED = 3
"""Tensors that a line names."""


@dataclass(frozen=True)
class ModelFile:
    """An opened file."""

    checkpoint: Checkpoint
    own: OwnClass
    """By which ranks run it."""
    config: Any
    """ComfyUI's: an object of a class in its supported_models."""

    @property
    def left_over(self) -> str:
        """The line that tells the user which tensors of the file are dropped. Empty if there is none."""
        names = list(map(short, self.checkpoint.unused))
        if not names:
            return ""
        shown = ", ".join(names[:NAMED]) + ", ..." * (len(names) > NAMED)
        return (
            f"Parallel DiT: left out, as in ComfyUI, because no part of the model uses them: {len(names)} tensors ({shown})"
        )


def open_file(path: Path, device: str, enlarged: TensorSizes = ()) -> ModelFile:
    """A single file, for ranks on this kind of device. Its header is read, and no values.

    ValueError, beginning with the input's name, for a file that ranks cannot run: of sound, solids and tools, too.
    `enlarged`: sizes of tensors that a LoRA enlarges.
    """
    with refusals(path):
        contents, tensors, config = _detected(contents_of(path), dict(enlarged))
        own = _own_class(contents, tensors, config, device)
        return ModelFile(checkpoint_of(contents, own, enlarged), own, config)


def comfyui_folder() -> str:
    """OwnClass.folder."""
    return str(Path(comfy.model_base.__file__).resolve().parents[1])


def import_settings(device: str) -> tuple[tuple[str, str, bool], ...]:
    """OwnClass.settings of a rank on this kind of device. A rank imports ComfyUI once, for models and VAEs alike."""
    cpu = device_kind(device) == "cpu"
    return ("comfy.cli_args", "args.cpu", cpu), ("comfy.cli_args", "args.use_pytorch_cross_attention", True)


def _detected(contents: Contents, enlarged: dict[str, tuple[int, ...]]) -> tuple[Contents, dict[str, torch.Tensor], Any]:
    """The contents, converted if ComfyUI converts such a file, their tensors, and ComfyUI's `config` of it."""
    stored = contents
    try:
        config = native_config(tensors := on_meta(contents.shapes | enlarged), contents.stated)
        if config is None and (conversion := conversion_of(contents.shapes)):
            contents = contents.converted(conversion)
            config = native_config(tensors := on_meta(contents.shapes | enlarged), contents.stated)
    except Exception:  # of any kind: ComfyUI's code may ask for what a damaged file has not
        raise stored.refusal() from None
    if config is None:
        raise stored.refusal()
    return contents, tensors, config


def _own_class(contents: Contents, tensors: dict[str, torch.Tensor], config: Any, device: str) -> OwnClass:
    """The class by which ComfyUI would compute the file."""
    name, stated, other = contents.name, contents.stated or {}, contents.other
    if other is not None and other.what not in (NOT_RUN, UNET):
        raise contents.refusal()
    if entry := unstated(type(config).__name__, stated):
        raise ValueError(
            f"model_name: the header of {name} lacks its {entry}, which the model's own files have. Without it ComfyUI "
            "too would compute another model. Get the file from another source."
        )
    stated_arguments = {argument: value for argument, value in config.unet_config.items() if argument in stated}
    check_own_arguments(name, stated_arguments, [tuple(tensor.shape) for tensor in tensors.values()])
    try:
        config.set_inference_dtype(torch.float32, None)
        with meta_parameters():
            native = config.get_model(tensors, "").diffusion_model
        renamed = {key: config.process_unet_state_dict({key: tensor}) for key, tensor in tensors.items()}
    except Exception:  # of any kind: ComfyUI's code may ask for what a damaged file has not, or a single tensor
        raise contents.refusal() from None
    kind, unet = type(native), isinstance(native, comfy.model_base.UNetModel)
    arguments = {
        argument: f"{DTYPE}{str(value).removeprefix('torch.')}" if isinstance(value, torch.dtype) else value
        for argument, value in class_arguments(config.unet_config).items()
    }
    is_other = other is not None and (other.what == UNET) != unet
    if is_other or not kind.__module__.startswith(ROOT) or not is_plain(arguments):
        raise contents.refusal()
    keys = {next(iter(names)): key for key, names in renamed.items() if len(names) == 1}
    return OwnClass(
        kind=type(config).__name__,
        folder=comfyui_folder(),
        module=kind.__module__,
        name=kind.__qualname__,
        arguments=json.dumps(arguments),
        settings=import_settings(device),
        imports=modules_named_by(kind),
        keys=tuple((argument, key) for argument, key in keys.items() if argument != key),
        halves=tuple(HALVES[dtype] for dtype in config.supported_inference_dtypes if dtype in HALVES),
        video=config.latent_format.latent_dimensions == 3,
        unet=unet,
    )
