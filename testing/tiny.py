"""Tiny random models with the real classes and key layouts, and a reference: diffusers' forward in this process.

Tests that any model will do for take the mini class (mini.py).
"""

from pathlib import Path

import torch

from parallel_backend.acceptance.tiny_model import relative as relative
from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.rank.stage.build import build_stage


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


def whole_model(path: Path, dtype: str = "fp32") -> torch.nn.Module:
    """The checkpoint as one process's model, loaded by the pack's loader."""
    checkpoint = open_checkpoint(path)
    blocks = checkpoint.family.total
    return build_stage(checkpoint, Span(0, blocks), torch.device("cpu"), dtype).model


def published_model(path: Path) -> torch.nn.Module:
    """The checkpoint in fp32 as a model of the family's class, without what a rank changes in it (fuse_norms)."""
    family, whole = open_checkpoint(path).family, whole_model(path)
    model = family.transformer_class().from_config(whole.config).eval()
    model.load_state_dict(whole.state_dict())
    return model


def rank_shard(tokens: torch.Tensor, order: TokenOrder, span: Span, with_text: bool) -> torch.Tensor:
    """Of the `tokens` of a call's latents (Patching.pack_all), what a stage of one rank is sent for a micro-step."""
    image_rows = tokens[:, order.images(span).slice]
    return torch.cat((image_rows, tokens[:, order.image :]), dim=1) if with_text else image_rows
