"""Tiny random models with the real classes and key layouts, and a reference: diffusers' own forward in this process."""

from pathlib import Path

import diffusers
import torch
from safetensors.torch import save_file

from parallel_backend.checkpoint import open_checkpoint, to_original
from parallel_backend.families import FAMILIES
from parallel_backend.layout import Span
from parallel_backend.stage import build_stage

FLUX = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 3,
    "num_single_layers": 5,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 12,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 6, 6),
}


def random_flux(config: dict = FLUX, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Weights large enough that every part of the model shows in the output."""
    model = diffusers.FluxTransformer2DModel(**config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.7 / parameter.shape[-1] ** 0.5
        else:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1 + ("norm_" in name)
    return model if dtype == torch.float32 else model.to(dtype)


def save_original(model: torch.nn.Module, config: dict, path: Path, prefix: str = "") -> Path:
    family = FAMILIES["flux"]
    state = to_original(family, config, model.state_dict())
    save_file({prefix + key: value.contiguous() for key, value in state.items()}, path)
    return path


def whole_model(path: Path, dtype: str = "fp32") -> torch.nn.Module:
    """The checkpoint as one process's model, loaded by our own loader."""
    checkpoint = open_checkpoint(path)
    blocks = checkpoint.family.block_count(checkpoint.config)
    return build_stage(checkpoint, Span(0, blocks), torch.device("cpu"), dtype)[0]


@torch.inference_mode()
def reference(model: torch.nn.Module, x: torch.Tensor, timestep: torch.Tensor, tensors: dict) -> torch.Tensor:
    """diffusers' forward on a latent [B, C, H, W], packed as the family says."""
    family = FAMILIES["flux"]
    rows, columns = family.grid(tuple(x.shape))
    image_ids = torch.cartesian_prod(torch.zeros(1), torch.arange(rows).float(), torch.arange(columns).float())
    out = model(
        hidden_states=family.pack(x),
        encoder_hidden_states=tensors["context"],
        pooled_projections=tensors["pooled"],
        guidance=tensors.get("guidance"),
        timestep=timestep,
        img_ids=image_ids,
        txt_ids=torch.zeros(tensors["context"].shape[1], 3),
        return_dict=False,
    )[0]
    return family.unpack(out, tuple(x.shape))


def inputs(config: dict, batch: int = 2, height: int = 16, width: int = 12, text: int = 7, seed: int = 1):
    """A latent, timesteps and conditioning tensors for a model of this config."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, config["in_channels"] // 4, height, width, generator=g)
    tensors = {
        "context": torch.randn(batch, text, config["joint_attention_dim"], generator=g),
        "pooled": torch.randn(batch, config["pooled_projection_dim"], generator=g),
    }
    if config["guidance_embeds"]:
        tensors["guidance"] = torch.full((batch,), 3.5)
    return x, torch.full((batch,), 0.7), tensors


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2 difference."""
    return ((a - b).norm() / b.norm()).item()
