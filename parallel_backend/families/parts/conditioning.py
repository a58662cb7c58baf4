"""Conditioning that several families share (text and pooled text), and small functions for their rows."""

from collections.abc import Sequence
from typing import Any

import torch

from ..base.step_inputs import Shapes


def hidden(config: dict[str, Any]) -> int:
    """Channels of a token: the default of Sizes.hidden."""
    return config["num_attention_heads"] * config["attention_head_dim"]


def count_blocks(shapes: Shapes, prefix: str) -> int:
    """Number of blocks with keys `<prefix><index>.`; the prefix ends in a dot."""
    return len({key.split(".")[prefix.count(".")] for key in shapes if key.startswith(prefix)})


def without_variance(out: torch.Tensor) -> torch.Tensor:
    """The output [b, 2 c, ...] of a model that also predicts a variance -> the prediction [b, c, ...] alone."""
    return out.chunk(2, dim=1)[0]


def check_learned_variance(model: str, learned: bool) -> None:
    """ValueError for a model without a predicted variance, which ComfyUI's class expects. `model`: its name for the user."""
    if not learned:
        raise ValueError(f"model_name: this {model} predicts no variance, as ComfyUI's does. Use another {model} file.")


def rotations(positions: torch.Tensor, widths: Sequence[int], theta: float) -> torch.Tensor:
    """Rotary embedding of positions [n, axes] as matrices [1, n, 1, sum(widths) / 2, 2, 2] float32
    (families/models/fused.py). Axis i rotates `widths[i]` channels."""
    axes = [
        torch.outer(axis, 1 / theta ** (torch.arange(0, width, 2, device=positions.device) / width))
        for axis, width in zip(positions.T, widths, strict=True)
    ]
    angles = torch.cat(axes, dim=1)[None, :, None]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))


def text(model: str, width: int, call: dict[str, Any]) -> torch.Tensor:
    """`context` [B, T, width] of a model call. ValueError if missing or of another width. `model`: name for the user."""
    context = call.get("context")
    if context is None:
        raise ValueError(f"positive, negative: {model} needs text conditioning (a CLIP Text Encode node made for {model}).")
    _check_width("text", context, width)
    return context


def text_and_pooled(model: str, loader: str, widths: tuple[int, int], call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context` [B, T, widths[0]] and `pooled` [B, widths[1]] of a model call. ValueError as for `text`.

    `model`: its name for the user. `loader`: the node that loads its text encoders.
    """
    context, pooled = text(model, widths[0], call), call.get("y")
    if pooled is None:
        raise ValueError(
            f"positive, negative: this conditioning has no pooled output, which {model} needs. Encode the prompt with a "
            f"{loader}."
        )
    _check_width("pooled output", pooled, widths[1])
    return {"context": context, "pooled": pooled}


def joint_widths(config: dict[str, Any]) -> tuple[int, int]:
    """Widths of text and pooled text for `text_and_pooled` under diffusers' usual names."""
    return config["joint_attention_dim"], config["pooled_projection_dim"]


def embedded_guidance(config: dict[str, Any], call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`guidance` [B] of a model call if the model embeds it, else nothing. ValueError if the call lacks it."""
    if not config["guidance_embeds"]:
        return {}
    if call.get("guidance") is None:
        raise ValueError("positive, negative: guidance is switched off, which this model's diffusers class cannot do.")
    return {"guidance": call["guidance"]}


def _check_width(name: str, tensor: torch.Tensor, width: int) -> None:
    if tensor.shape[-1] != width:
        raise ValueError(
            f"positive, negative: the conditioning's {name} has width {tensor.shape[-1]}, this model needs {width}. "
            "It was encoded with another model's text encoder."
        )


def example(widths: tuple[int, int], text_tokens: int) -> dict[str, torch.Tensor]:
    """Random conditioning of batch 1 for `text_and_pooled`."""
    return {"context": torch.randn(1, text_tokens, widths[0]), "pooled": torch.randn(1, widths[1])}
