"""Anima: Cosmos Predict2's transformer for pictures, behind an adapter of the text encoder's output.

The adapter is in the transformer's file, and a prompt's text passes it once, in ComfyUI's process: T5's tokens of the prompt
attend to the output of a language model. Key layout and arithmetic: ComfyUI's (comfy/ldm/anima/model.py).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F

from .base.family import TextModel, TextWeights
from .base.file_layout import FolderLayout
from .base.step_inputs import Config
from .cosmos_predict2 import COSMOS_PREDICT2

ADAPTER = "llm_adapter."
LEAST_TOKENS = 512
"""Shorter texts are padded to this length with zeros."""
EPS, ROPE_THETA = 1e-6, 10000.0

Tensors = Mapping[str, torch.Tensor]
Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [T, D]: channels i and i + D / 2 are a pair."""


@torch.inference_mode()
def through_adapter(
    _config: Config,
    weights: TextWeights,
    text: torch.Tensor,
    ids: torch.Tensor | None = None,
    t5xxl_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The language model's output [B, S, C] and T5's tokens [B, T] -> the blocks' text [B, at least LEAST_TOKENS, C'].

    `t5xxl_weights` [B, T, 1]: by which each token's result is multiplied. Without `ids` the text is for the blocks already.
    """
    if ids is None:
        return text
    tensors = weights(ADAPTER)
    x = F.embedding(ids, tensors["embed.weight"])
    if "in_proj.weight" in tensors:
        x = F.linear(x, tensors["in_proj.weight"], tensors["in_proj.bias"])
    (head,) = tensors["blocks.0.cross_attn.q_norm.weight"].shape
    own, source = (_rotation(each.shape[1], head, text) for each in (x, text))
    number = 0
    while block := {
        name.removeprefix(f"blocks.{number}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"blocks.{number}.")
    }:
        x = _block(block, x, text, own, source)
        number += 1
    x = F.linear(x, tensors["out_proj.weight"], tensors["out_proj.bias"])
    x = F.rms_norm(x, x.shape[-1:], tensors["norm.weight"], EPS)
    if t5xxl_weights is not None:
        x = x * t5xxl_weights
    return F.pad(x, (0, 0, 0, max(0, LEAST_TOKENS - x.shape[1])))


def _rotation(tokens: int, head: int, like: torch.Tensor) -> Rotation:
    """Of positions 0, 1, ..., made in float32, in the dtype and on the device of `like`."""
    frequencies = ROPE_THETA ** -(torch.arange(0, head, 2, device=like.device).float() / head)
    angles = (torch.arange(tokens, device=like.device).float()[:, None] * frequencies).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _block(tensors: Tensors, x: torch.Tensor, text: torch.Tensor, own: Rotation, source: Rotation) -> torch.Tensor:
    """Tokens [B, T, C] attend to themselves, where the block has layers for it, then to the text; then the feed-forward."""
    if "self_attn.q_proj.weight" in tensors:
        normed = _norm(tensors, "norm_self_attn", x)
        x = x + _attention(tensors, "self_attn", normed, normed, own, own)
    x = x + _attention(tensors, "cross_attn", _norm(tensors, "norm_cross_attn", x), text, own, source)
    hidden = F.linear(_norm(tensors, "norm_mlp", x), tensors["mlp.0.weight"], tensors["mlp.0.bias"])
    return x + F.linear(F.gelu(hidden), tensors["mlp.2.weight"], tensors["mlp.2.bias"])


def _norm(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], EPS)


def _attention(
    tensors: Tensors, name: str, x: torch.Tensor, text: torch.Tensor, own: Rotation, source: Rotation
) -> torch.Tensor:
    """Attention of `x` [B, T, C] to `text` [B, S, C']."""

    def heads(part: str, of: torch.Tensor) -> torch.Tensor:
        (size,) = tensors[f"{name}.q_norm.weight"].shape
        return F.linear(of, tensors[f"{name}.{part}_proj.weight"]).unflatten(-1, (-1, size))

    def rotated(part: str, of: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        normed = F.rms_norm(of, of.shape[-1:], tensors[f"{name}.{part}_norm.weight"], EPS).transpose(1, 2)
        first, second = normed.chunk(2, dim=-1)
        cos, sin = rotation
        return normed * cos + torch.cat((-second, first), dim=-1) * sin

    query, key = rotated("q", heads("q", x), own), rotated("k", heads("k", text), source)
    out = F.scaled_dot_product_attention(query, key, heads("v", text).transpose(1, 2))
    return F.linear(out.transpose(1, 2).flatten(2), tensors[f"{name}.o_proj.weight"])


ANIMA = replace(
    COSMOS_PREDICT2,
    name="anima",
    native_classes=("Anima",),
    file=replace(
        COSMOS_PREDICT2.file,
        folder=FolderLayout(takes=lambda _config: False),
        detect=lambda shapes: (
            "blocks.0.mlp.layer1.weight" in shapes and f"{ADAPTER}blocks.0.cross_attn.q_proj.weight" in shapes
        ),
    ),
    inputs=replace(COSMOS_PREDICT2.inputs, accepts=()),
    text_model=TextModel(prefixes=(ADAPTER,), run=through_adapter),
)
