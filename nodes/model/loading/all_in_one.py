"""All-in-one files: ComfyUI creates their text encoder and VAE, without reading the transformer in the same file."""

import math
from pathlib import Path
from typing import Any

import comfy.memory_management
import comfy.model_detection
import comfy.sd
import comfy.utils
import folder_paths
import torch
from safetensors import safe_open

from parallel_backend.checkpoints.tensor_files import DTYPES

NOTE = ".comfy_quant"
"""Suffix of the names of tensors that describe how a layer is quantized."""


def clip_and_vae(path: Path) -> tuple[comfy.sd.CLIP | None, comfy.sd.VAE]:
    """CLIP and VAE as Load Checkpoint returns them. The transformer's weights are not read.

    As with Load Checkpoint, a file without a text encoder gives None, and one without a VAE gives a VAE that raises when
    used. Raises ValueError for a file that only has a transformer.
    """
    tensors, metadata = _mapped(path)
    embeddings = folder_paths.get_folder_paths("embeddings")
    _, clip, vae, _ = comfy.sd.load_state_dict_guess_config(
        tensors, embedding_directory=embeddings, output_model=False, metadata=metadata
    )
    loaders = comfy.sd.load_checkpoint_clip_patcher, comfy.sd.load_checkpoint_vae_patcher
    for part, loader in zip((clip, vae), loaders, strict=True):
        if (patcher := getattr(part, "patcher", None)) is not None:
            patcher.cached_patcher_init = (loader, (str(path), embeddings))  # for copies on ComfyUI's other GPUs
    return clip, vae


def _mapped(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """Return (the file's tensors as views of the mapped file, metadata of its header). The transformer's tensors are on the
    meta device, except single values and descriptions that ComfyUI's detection reads."""
    with safe_open(path, framework="pt", device="cpu") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        prefix = comfy.model_detection.unet_prefix_from_state_dict(slices)
        left_out = {name for name in slices if name.startswith(prefix) and not name.endswith(NOTE)}
        left_out = {name for name in left_out if math.prod(slices[name].get_shape()) > 1}
        if not left_out or all(name.startswith(prefix) for name in slices):
            raise ValueError(
                f"ckpt_name: {path.name} has neither a text encoder nor a VAE beside its transformer. Use Parallel DiT "
                "Loader, with Load CLIP and Load VAE."
            )
        if comfy.memory_management.aimdo_enabled:  # its loading to GPUs needs views of ComfyUI's own map
            tensors, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
        else:
            tensors, metadata = {name: file.get_tensor(name) for name in slices if name not in left_out}, file.metadata()
        without_values = {name: _shape_alone(slices[name]) for name in left_out}
    return tensors | without_values, metadata


def _shape_alone(part: Any) -> torch.Tensor:
    """Return a safetensors slice as a tensor on the meta device. `get_tensor` would read its first page."""
    return torch.empty(part.get_shape(), dtype=DTYPES.get(part.get_dtype(), torch.uint8), device="meta")
