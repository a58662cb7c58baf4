"""Text that several families take, and small functions for their rows."""

from typing import Any

import torch

from ..base.step_inputs import Shapes


def hidden(config: dict[str, Any]) -> int:
    """Channels of a token: the default of Sizes.hidden."""
    return config["num_attention_heads"] * config["attention_head_dim"]


def count_blocks(shapes: Shapes, prefix: str) -> int:
    """Number of blocks with keys `<prefix><index>.`; the prefix ends in a dot."""
    return len({key.split(".")[prefix.count(".")] for key in shapes if key.startswith(prefix)})


def text(model: str, width: int, call: dict[str, Any]) -> torch.Tensor:
    """`context` [B, T, width] of a model call. ValueError if missing or of another width. `model`: name for the user."""
    context = call.get("context")
    if context is None:
        raise ValueError(f"positive, negative: {model} needs text conditioning (a CLIP Text Encode node made for {model}).")
    if context.shape[-1] != width:
        raise ValueError(
            f"positive, negative: the conditioning's text has width {context.shape[-1]}, this model needs {width}. "
            "It was encoded with another model's text encoder."
        )
    return context
