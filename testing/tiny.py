"""Tiny random models with the real classes and key layouts, and a reference: diffusers' forward in this process.

Tests that any model will do for take the mini class (mini.py).
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from parallel_backend.acceptance.tiny_model import Call
from parallel_backend.acceptance.tiny_model import relative as relative
from parallel_backend.checkpoints.checkpoint import open_checkpoint, to_original
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.families import FAMILIES
from parallel_backend.rank.stage.build import build_stage

FLUX: dict[str, Any] = {
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


def random_flux(config: dict[str, Any] = FLUX, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A FluxTransformer2DModel of diffusers with random weights, see `randomise`."""
    model = randomise(FAMILIES["flux"].transformer_class()(**config).eval(), seed)
    return model if dtype == torch.float32 else model.to(dtype)


def randomise(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Random weights, large enough that every part of the model changes the output."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            fan_in = parameter[0].numel()
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.7 / fan_in**0.5
        else:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1 + ("norm_" in name)
    return model


def save_original(
    model: torch.nn.Module, config: dict[str, Any], path: Path, prefix: str = "", family: str = "flux"
) -> Path:
    """Write the model as a single file in original key layout."""
    state = to_original(FAMILIES[family], config, model.state_dict())
    save_file({prefix + key: value.contiguous() for key, value in state.items()}, path)
    return path


def inputs(
    config: dict[str, Any] = FLUX,
    batch: int = 2,
    height: int = 16,
    width: int = 12,
    text: int = 7,
    seed: int = 1,
    family: str = "flux",
) -> Call:
    """A call of a model of this config."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, FAMILIES[family].sizes.latent_channels(config), height, width, generator=g)
    tensors = {
        "context": torch.randn(batch, text, config["joint_attention_dim"], generator=g),
        "pooled": torch.randn(batch, config["pooled_projection_dim"], generator=g),
    }
    if config.get("guidance_embeds"):
        tensors["guidance"] = torch.full((batch,), 3.5)
    time_embed = FAMILIES[family].forward.time_embed
    assert time_embed is not None
    return x, torch.full((batch,), 700.0 / time_embed.factor), tensors


@torch.inference_mode()
def reference(
    model: torch.nn.Module, x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    """diffusers' forward on a latent [B, C, H, W], packed as the family says."""
    family = FAMILIES["flux"]
    rows, columns = family.patching.grid(tuple(x.shape))
    image_ids = torch.cartesian_prod(torch.zeros(1), torch.arange(rows).float(), torch.arange(columns).float())
    out = model(
        hidden_states=family.patching.pack(x),
        encoder_hidden_states=tensors["context"],
        pooled_projections=tensors["pooled"],
        guidance=tensors.get("guidance"),
        timestep=timestep,
        img_ids=image_ids,
        txt_ids=torch.zeros(tensors["context"].shape[1], 3),
        return_dict=False,
    )[0]
    return family.patching.unpack(out, tuple(x.shape))


def whole_model(path: Path, dtype: str = "fp32") -> torch.nn.Module:
    """The checkpoint as one process's model, loaded by the pack's loader."""
    checkpoint = open_checkpoint(path)
    blocks = checkpoint.family.blocks.total(checkpoint.config)
    return build_stage(checkpoint, Span(0, blocks), torch.device("cpu"), dtype).model


def published_model(path: Path) -> torch.nn.Module:
    """The checkpoint in fp32 as a model of the family's class, without what a rank changes in it (Family.fuse)."""
    family, whole = open_checkpoint(path).family, whole_model(path)
    config = {name: value for name, value in whole.config.items() if name not in family.file.settings}
    model = family.transformer_class().from_config(config).eval()
    model.register_to_config(**whole.config)
    model.load_state_dict(whole.state_dict())
    return model


def rank_shard(tokens: torch.Tensor, order: TokenOrder, span: Span, with_text: bool) -> torch.Tensor:
    """Of the `tokens` of a call's latents (Patching.pack_all), what a stage of one rank is sent for a micro-step."""
    image_rows = tokens[:, order.images(span).slice]
    return torch.cat((image_rows, tokens[:, order.image :]), dim=1) if with_text else image_rows
