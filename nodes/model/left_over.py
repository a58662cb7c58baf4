"""Tensors of a file that no part of the model uses: dropped, as in ComfyUI, if its class does not have them."""

from typing import Any

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.meta_parameters import meta_parameters
from parallel_backend.core.short_text import short

from .native_call import native_config, on_meta

NAMED = 3
"""Tensors that a line names."""


def check_left_over(checkpoint: Checkpoint) -> None:
    """ValueError for an unused tensor of the file by which ComfyUI takes it for another model, or which its class has."""
    if not checkpoint.unused:
        return
    shapes = checkpoint.original_shapes
    left_over = {key: entry.shape for key, entry in checkpoint.unused.items()}
    tensors = on_meta(shapes | left_over)
    config = native_config(tensors, checkpoint.stated)
    detected, name = _detected(config), short(checkpoint.path.name)
    if detected != _detected(native_config(on_meta(shapes), checkpoint.stated)):
        marks = (
            key
            for key in left_over
            if _detected(native_config(on_meta(shapes | {key: left_over[key]}), checkpoint.stated)) == detected
        )
        raise ValueError(
            f"model_name: {name} holds {short(next(marks, next(iter(left_over))))}, by which ComfyUI takes it for another "
            f"model than Parallel DiT's {checkpoint.family.name}. Load it with Load Diffusion Model, on one GPU."
        )
    config.set_inference_dtype(torch.float32, None)
    with meta_parameters():
        names = config.get_model(tensors, "").diffusion_model.state_dict()
    used = [key for key in left_over if any(each in names for each in config.process_unet_state_dict({key: tensors[key]}))]
    if used:
        more = f" and {len(used) - 1} more" * (len(used) > 1)
        raise ValueError(
            f"model_name: {name} holds {short(used[0])}{more}, which ComfyUI's class uses and {checkpoint.family.name} as "
            "Parallel DiT computes it does not. Load it with Load Diffusion Model, on one GPU."
        )


def _detected(config: Any) -> Any:
    """What ComfyUI takes a file for."""
    return None if config is None else (type(config), config.unet_config)


def left_over_line(checkpoint: Checkpoint) -> str:
    """The line that tells the user which tensors of the file are dropped. Empty if there is none."""
    count, names = len(checkpoint.unused), list(map(short, checkpoint.unused))
    if not count:
        return ""
    shown = ", ".join(names[:NAMED]) + ", ..." * (count > NAMED)
    return f"Parallel DiT: left out, as in ComfyUI, since no part of the model uses them: {count} tensors ({shown})"
