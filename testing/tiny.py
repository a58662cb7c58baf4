"""Tiny random models with the real classes and key layouts, and a reference: diffusers' forward in this process."""

import functools
from pathlib import Path

import diffusers
import torch
import torch.nn.functional as F

from parallel_backend.acceptance.tiny_flux import FLUX as FLUX
from parallel_backend.acceptance.tiny_flux import inputs as inputs
from parallel_backend.acceptance.tiny_flux import random_flux as random_flux
from parallel_backend.acceptance.tiny_flux import randomise
from parallel_backend.acceptance.tiny_flux import reference as reference
from parallel_backend.acceptance.tiny_flux import relative as relative
from parallel_backend.acceptance.tiny_flux import save_original as save_original
from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.rank.host_memory.host_store import HostStore
from parallel_backend.rank.stage.build import build_stage
from parallel_backend.rank.stage.store.device_copies import copies_of
from parallel_backend.rank.stage.store.weight_store import WeightStore

SD3 = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 12,
    "pos_embed_max_size": 40,
    "dual_attention_layers": (),
    "qk_norm": "rms_norm",
}


def random_sd3(config: dict = SD3, seed: int = 0) -> torch.nn.Module:
    """diffusers' module with random weights, see `randomise`; its table of positions is random too, at any size."""
    model = randomise(diffusers.SD3Transformer2DModel(**config).eval(), seed)
    model.pos_embed.pos_embed = torch.randn(model.pos_embed.pos_embed.shape, generator=torch.Generator().manual_seed(seed))
    return model


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


def stored_model(path: Path) -> tuple[torch.nn.Module, WeightStore]:
    """As `whole_model` in fp32, with the store that its weights are in."""
    checkpoint, cpu = open_checkpoint(path), torch.device("cpu")
    host = HostStore(0, cpu, Degrees(), checkpoint, None)
    store = WeightStore(copies_of(cpu), host, Traffic(cpu))
    load = functools.partial(store.load, progress=lambda fraction: None)
    whole = Span(0, checkpoint.family.blocks.total(checkpoint.config))
    return build_stage(checkpoint, whole, cpu, "fp32", load=load).model, store


def rank_shard(tokens: torch.Tensor, order: TokenOrder, span: Span, with_text: bool) -> torch.Tensor:
    """Of the `tokens` of a call's latents (Patching.pack_all), what a stage of one rank is sent for a micro-step."""
    image_rows = tokens[:, order.images(span).slice]
    return torch.cat((image_rows, tokens[:, order.image :]), dim=1) if with_text else image_rows


@torch.inference_mode()
def sd3_reference(model: torch.nn.Module, x: torch.Tensor, timestep: torch.Tensor, tensors: dict) -> torch.Tensor:
    """diffusers' forward on a latent [B, C, H, W]; odd sizes are padded circularly, as ComfyUI does."""
    height, width = x.shape[-2:]
    out = model(
        hidden_states=F.pad(x, (0, width % 2, 0, height % 2), mode="circular"),
        encoder_hidden_states=tensors["context"],
        pooled_projections=tensors["pooled"],
        timestep=timestep,
        return_dict=False,
    )[0]
    return out[..., :height, :width]
