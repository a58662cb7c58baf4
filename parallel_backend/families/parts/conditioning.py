"""What families have in common: positions on a grid, text and pooled text as conditioning."""

from collections.abc import Sequence
from typing import Any

import torch

from parallel_backend.families.base.step_inputs import Shapes


def hidden(config: dict[str, Any]) -> int:
    return config["num_attention_heads"] * config["attention_head_dim"]


def count_blocks(shapes: Shapes, prefix: str) -> int:
    """How many blocks have keys `<prefix><index>.`; `prefix` ends in a dot."""
    return len({key.split(".")[prefix.count(".")] for key in shapes if key.startswith(prefix)})


def without_variance(out: torch.Tensor) -> torch.Tensor:
    """What a model of `learned_variance` predicts [b, 2 c, ...], without the variance behind it."""
    return out.chunk(2, dim=1)[0]


def check_learned_variance(model: str, learned: bool) -> None:
    """ValueError for a model that predicts none, which the native one cannot be. `model`: what the user calls it."""
    if not learned:
        raise ValueError(f"model_name: this {model} predicts no variance, as ComfyUI's does. Use another {model} file.")


def rotary_table(positions: torch.Tensor, widths: Sequence[int], theta: float) -> torch.Tensor:
    """[n, axes] -> complex64 [n, sum(widths) / 2]: axis i turns its `widths[i]` channels in pairs."""
    angles = [
        torch.outer(axis, 1 / theta ** (torch.arange(0, width, 2, device=positions.device) / width))
        for axis, width in zip(positions.T, widths, strict=True)
    ]
    angles = torch.cat(angles, dim=1)
    return torch.polar(torch.ones_like(angles), angles)


def text(model: str, width: int, given: dict[str, Any]) -> torch.Tensor:
    """context [B, T, width] of a model call, or ValueError. `model`: what the user calls it."""
    context = given.get("context")
    if context is None:
        raise ValueError(f"positive, negative: {model} needs text conditioning (a CLIP Text Encode node made for {model}).")
    _check_width("text", context, width)
    return context


def text_and_pooled(model: str, loader: str, config: dict[str, Any], given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """context [B, T, joint_attention_dim] and pooled [B, pooled_projection_dim] of a model call, or ValueError.

    `model`, `loader`: what the user calls the model, and the node that loads its text encoders.
    """
    context, pooled = text(model, config["joint_attention_dim"], given), given.get("y")
    if pooled is None:
        raise ValueError(
            f"positive, negative: this conditioning has no pooled output, which {model} needs. Encode the prompt with a "
            f"{loader}."
        )
    _check_width("pooled output", pooled, config["pooled_projection_dim"])
    return {"context": context, "pooled": pooled}


def _check_width(name: str, tensor: torch.Tensor, width: int) -> None:
    if tensor.shape[-1] != width:
        raise ValueError(
            f"positive, negative: the conditioning's {name} has width {tensor.shape[-1]}, this model needs {width}. "
            "It was encoded with another model's text encoder."
        )


def example(config: dict[str, Any], text_tokens: int) -> dict[str, torch.Tensor]:
    """Random values for what `text_and_pooled` gives, of batch 1."""
    return {
        "context": torch.randn(1, text_tokens, config["joint_attention_dim"]),
        "pooled": torch.randn(1, config["pooled_projection_dim"]),
    }
