"""Stands in for KJNodes' module of this name: what WanVideoNAG puts on a MODEL, by the names it has there."""

import types
from typing import Any

import comfy.ldm.modules.attention
import torch


def attend(layer, query: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    keys, values = layer.norm_k(layer.k(text)), layer.v(text)
    return comfy.ldm.modules.attention.optimized_attention(query, keys, values, heads=layer.num_heads)


class WanCrossAttentionPatch:
    def __init__(self, text: torch.Tensor, scale: float, alpha: float, tau: float, i2v: bool, input_type: str):
        self.nag_context, self.nag_scale, self.nag_alpha, self.nag_tau = text, scale, alpha, tau
        self.i2v, self.input_type = i2v, input_type

    def __get__(self, layer, kind=None):
        def wrapped_attention(
            layer, x: torch.Tensor, context: torch.Tensor, context_img_len: int | None = None, **_named: Any
        ) -> torch.Tensor:
            query, of_picture = layer.norm_q(layer.q(x)), 0
            if self.i2v:
                picture, context = context[:, :context_img_len], context[:, context_img_len:]
                keys, values = layer.norm_k_img(layer.k_img(picture)), layer.v_img(picture)
                of_picture = comfy.ldm.modules.attention.optimized_attention(query, keys, values, heads=layer.num_heads)
            out = attend(layer, query, context)
            halves = len(x) == 2 or (len(x) > 2 and not self.i2v)
            guided = len(x) // 2 if halves and (self.i2v or self.input_type != "batch") else len(x)
            positive = out[:guided]
            away = self.nag_scale * positive
            away = away - (self.nag_scale - 1) * attend(layer, query[:guided], self.nag_context.expand(guided, -1, -1))
            before, after = (each.norm(p=1, dim=-1, keepdim=True) for each in (positive, away))
            away = torch.where(after / before > self.nag_tau, away * before * self.nag_tau / after, away)
            guided_out = torch.cat((self.nag_alpha * away + (1 - self.nag_alpha) * positive, out[guided:]))
            return layer.o(guided_out + of_picture)

        return types.MethodType(wrapped_attention, layer or self)


def of_other_model(model):
    """The MODEL with WanVideoNAG's attention, for a model that has no such layer."""
    clone = model.clone()
    made = WanCrossAttentionPatch(torch.zeros(1, 1, 8), 5.0, 0.5, 1.5, False, "default").__get__(None)
    clone.add_object_patch("diffusion_model.blocks.0.cross_attn.forward", made)
    return clone


def nag(model, text: torch.Tensor, input_type: str):
    """The MODEL of the node WanVideoNAG."""
    clone = model.clone()
    native = clone.get_model_object("diffusion_model")
    native.text_embedding.to("cpu")
    text = native.text_embedding(text)
    for index, block in enumerate(native.blocks):
        i2v = hasattr(block.cross_attn, "k_img")
        made = WanCrossAttentionPatch(text, 5.0, 0.5, 1.5, i2v, input_type).__get__(block.cross_attn, block.__class__)
        clone.add_object_patch(f"diffusion_model.blocks.{index}.cross_attn.forward", made)
    return clone
