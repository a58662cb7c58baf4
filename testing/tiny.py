"""Random weights, and what a rank is sent of a call's tokens. Tests that any model will do for take the mini class (mini.py)."""

import torch

from parallel_backend.acceptance.tiny_model import relative as relative
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder


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


def rank_shard(tokens: torch.Tensor, order: TokenOrder, span: Span, with_text: bool) -> torch.Tensor:
    """Of the `tokens` of a call's latents (Patching.pack_all), what a stage of one rank is sent for a micro-step."""
    image_rows = tokens[:, order.images(span).slice]
    return torch.cat((image_rows, tokens[:, order.image :]), dim=1) if with_text else image_rows
