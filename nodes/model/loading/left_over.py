"""Tensors of a file that no part of the model uses: dropped, as in ComfyUI, if its class does not have them."""

from typing import Any

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.meta_parameters import meta_parameters
from parallel_backend.core.short_text import short

from ..native.native_call import native_config, on_meta

NAMED = 3
"""Tensors that a line names."""
INSTEAD = "Load it with Load Diffusion Model, on one GPU."


def check_left_over(checkpoint: Checkpoint) -> None:
    """ValueError for an unused tensor of the file by which ComfyUI takes it for another model, or which its class has."""
    if not checkpoint.unused:
        return
    try:
        mark, used = _marks_and_used(checkpoint)
    except Exception as error:  # of any kind: ComfyUI's code may ask for what a damaged file has not
        mark, used = f"{next(iter(checkpoint.unused))} ({type(error).__name__})", ""
    said, name = f"model_name: {short(checkpoint.path.name)} has", checkpoint.family.name
    if mark:
        raise ValueError(f"{said} {short(mark)}, which makes it another model than {name} in ComfyUI. {INSTEAD}")
    if used:
        raise ValueError(f"{said} {short(used)}, which ComfyUI's class uses, but Parallel DiT's {name} does not. {INSTEAD}")


def _marks_and_used(checkpoint: Checkpoint) -> tuple[str, str]:
    """(first unused tensor that changes what ComfyUI detects, first one that its class has). Empty: there is none."""
    shapes, unused = checkpoint.original_shapes, {key: entry.shape for key, entry in checkpoint.unused.items()}
    tensors = on_meta(shapes | unused)
    config = native_config(tensors, checkpoint.stated)
    if _detected(config) != (plain := _detected(native_config(on_meta(shapes), checkpoint.stated))):
        alone = ((key, native_config(on_meta(shapes | {key: unused[key]}), checkpoint.stated)) for key in unused)
        return next((key for key, found in alone if _detected(found) != plain), next(iter(unused))), ""
    if config is None:
        return "", ""
    config.set_inference_dtype(torch.float32, None)
    with meta_parameters():
        names = config.get_model(tensors, "").diffusion_model.state_dict()
    renamed = {key: config.process_unet_state_dict({key: tensors[key]}) for key in unused}
    return "", next((key for key, given in renamed.items() if any(each in names for each in given)), "")


def _detected(config: Any) -> Any:
    """What ComfyUI takes a file for."""
    return None if config is None else (type(config), config.unet_config)


def left_over_line(checkpoint: Checkpoint) -> str:
    """The line that tells the user which tensors of the file are dropped. Empty if there is none."""
    count, names = len(checkpoint.unused), list(map(short, checkpoint.unused))
    if not count:
        return ""
    shown = ", ".join(names[:NAMED]) + ", ..." * (count > NAMED)
    return f"Parallel DiT: left out, as in ComfyUI, because no part of the model uses them: {count} tensors ({shown})"
