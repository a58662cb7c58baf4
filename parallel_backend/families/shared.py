"""What families of image models have in common: 2 x 2 patches as tokens, text and pooled text as conditioning."""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange

from .base import Shapes

PATCH = 2


def hidden(config: dict[str, Any]) -> int:
    return config["num_attention_heads"] * config["attention_head_dim"]


def count_blocks(shapes: Shapes, prefix: str) -> int:
    """How many blocks have keys `<prefix><index>.`; `prefix` ends in a dot."""
    return len({key.split(".")[prefix.count(".")] for key in shapes if key.startswith(prefix)})


def grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Latent [..., H, W] -> rows and columns of tokens."""
    return tuple(-(-size // PATCH) for size in shape[-2:])


def pack(latent: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] -> [B, rows * columns, C * 4]; odd sizes are padded circularly, as ComfyUI does."""
    height, width = latent.shape[-2:]
    latent = F.pad(latent, (0, -width % PATCH, 0, -height % PATCH), mode="circular")
    return rearrange(latent, "b c (h ph) (w pw) -> b (h w) (c ph pw)", ph=PATCH, pw=PATCH)


def unpack(tokens: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """[B, rows * columns, c * 4] -> [B, c, H, W], the padding of odd sizes cut off."""
    rows, columns = grid(shape)
    latent = rearrange(tokens, "b (h w) (c ph pw) -> b c (h ph) (w pw)", h=rows, w=columns, ph=PATCH, pw=PATCH)
    return latent[..., : shape[-2], : shape[-1]]


def text_and_pooled(model: str, loader: str, config: dict[str, Any], given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """context [B, T, joint_attention_dim] and pooled [B, pooled_projection_dim] of a model call, or ValueError.

    `model`, `loader`: what the user calls the model, and the node that loads its text encoders.
    """
    context, pooled = given.get("context"), given.get("y")
    if context is None:
        raise ValueError(f"positive, negative: {model} needs text conditioning (a CLIP Text Encode node made for {model}).")
    if pooled is None:
        raise ValueError(
            f"positive, negative: this conditioning has no pooled output, which {model} needs. Encode the prompt with a "
            f"{loader}."
        )
    for name, tensor, width in (
        ("text", context, config["joint_attention_dim"]),
        ("pooled output", pooled, config["pooled_projection_dim"]),
    ):
        if tensor.shape[-1] != width:
            raise ValueError(
                f"positive, negative: the conditioning's {name} has width {tensor.shape[-1]}, this model needs {width}. "
                "It was encoded with another model's text encoder."
            )
    return {"context": context, "pooled": pooled}


def example(config: dict[str, Any], text_tokens: int) -> dict[str, torch.Tensor]:
    """Random values for what `text_and_pooled` gives, of batch 1."""
    return {
        "context": torch.randn(1, text_tokens, config["joint_attention_dim"]),
        "pooled": torch.randn(1, config["pooled_projection_dim"]),
    }
