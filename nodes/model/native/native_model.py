"""A checkpoint in ComfyUI itself, for Parallel Self-Test, which calls it like the ranks' model and compares them."""

import contextlib
from collections.abc import Iterator

import comfy.model_management
import comfy.sd
import torch

from parallel_backend.acceptance.session import NotLookedAt
from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.sampling import Predict
from parallel_backend.own_class.calls.call_arguments import OPTIONS, from_tensors, structure_of

READABLE = (".safetensors", ".sft")


@contextlib.contextmanager
def native_model(checkpoint: Checkpoint) -> Iterator[Predict]:
    """Context with ComfyUI's own model of this file, on the device and in the dtype that ComfyUI chooses. Raises NotLookedAt
    for a file that ComfyUI's loader does not read, or a model that needs more than the given tensors."""
    if checkpoint.path.suffix not in READABLE:
        raise NotLookedAt("ComfyUI's own loader reads only single safetensors files")
    try:
        patcher = comfy.sd.load_diffusion_model(str(checkpoint.path))
    except RuntimeError as error:
        raise NotLookedAt(f"ComfyUI cannot load the file ({str(error).partition(chr(10))[0]})") from error
    comfy.model_management.load_models_gpu([patcher])
    device, dtype = patcher.load_device, patcher.model.manual_cast_dtype or patcher.model.get_dtype()

    @torch.inference_mode()
    def predict(x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        given = {name: tensor.to(device) for name, tensor in tensors.items()}
        conditioning = {OPTIONS: {}} | from_tensors(given, structure_of(tensors))  # as ComfyUI has given them to it
        try:
            output = patcher.model.diffusion_model(x.to(device, dtype), timestep.to(device).float(), **conditioning)
        except (TypeError, RuntimeError) as error:  # the model needs other arguments, or memory is short
            raise NotLookedAt(f"ComfyUI's model cannot be called in this way ({error})") from error
        return output.float().cpu()

    try:
        yield predict
    finally:
        comfy.model_management.unload_all_models()  # the ranks need this memory next
        comfy.model_management.soft_empty_cache()
