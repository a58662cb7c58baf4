"""Ideogram 4: single-stream blocks, joint sequence [text, image]. Without text it runs over the image alone.

Its guidance takes a second file, trained without text, for the negative side (Dual Model CFG Guider): two MODELs of this
family. Key layouts: Ideogram's as ComfyUI's files have it, and diffusers' Ideogram4Transformer2DModel; the class is ours.
"""

from typing import Any

import torch
from einops import rearrange

from .base.blocks import JOINT, BlockList, Blocks
from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed, cached
from .base.file_layout import FileLayout, Source
from .base.patching import Patching
from .base.segments import text_then_image
from .base.step_inputs import TEXT_MASK, Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN, COLUMN_BY_HEADS, GATHER, ROW, ROW_BY_HEADS
from .parts.conditioning import count_blocks, hidden, text
from .parts.key_map import WEIGHT, KeyMap

LAYERS = "layers"
_QKV = ("attention.to_q", "attention.to_k", "attention.to_v")
_NORMS = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2", "attention.norm_q", "attention.norm_k")
_FEED_FORWARD = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
SECTIONS = (24, 20, 20)
"""Pairs of channels of a head of 128 that frames (always 0), rows and columns rotate. The weights do not show them."""


def _configure(shapes: Shapes) -> Config:
    (head,) = shapes["layers.0.attention.norm_q.weight"]
    width, channels = shapes["input_proj.weight"]
    return {
        "in_channels": channels,
        "num_layers": count_blocks(shapes, f"{LAYERS}."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "intermediate_size": shapes["layers.0.feed_forward.w1.weight"][0],
        "adaln_dim": shapes["adaln_proj.weight"][0],
        "llm_features_dim": shapes["llm_cond_proj.weight"][1],
        "rope_theta": 5_000_000,
        "mrope_section": SECTIONS,
        "norm_eps": 1e-5,
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    keys.same("input_proj", "llm_cond_proj", "t_embedding.mlp_in", "t_embedding.mlp_out", "adaln_proj")
    keys.same("llm_cond_norm", "embed_image_indicator", parameters=WEIGHT)
    keys.same("final_layer.linear", "final_layer.adaln_modulation")
    for block in keys.each(LAYERS, LAYERS, config["num_layers"]):
        block.split("attention.qkv", dict.fromkeys(_QKV, hidden(config)), WEIGHT)
        block.copy({"attention.to_out.0": "attention.o"}, WEIGHT)
        block.same(*_FEED_FORWARD, *_NORMS, parameters=WEIGHT)
        block.same("adaln_modulation")
    return keys.sources


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context` [B, T, llm_features_dim], T = 0 in a call without text, and TEXT_MASK where some of it is masked."""
    width = config["llm_features_dim"]
    if call.get("context") is None:
        return {"context": torch.zeros(call["latent"][0], 0, width)}
    tensors, mask = {"context": text("Ideogram 4", width, call)}, call.get("attention_mask")
    if mask is not None and not mask.bool().all():
        tensors[TEXT_MASK] = mask.bool()
    return tensors


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    context, tokens = step.tensors.get("context"), step.x
    if context is None:  # later stages look at shapes alone
        context = step.zeros(1).expand(-1, len(step.text), config["llm_features_dim"])
    if tokens is None:
        tokens = step.zeros(1).expand(-1, len(step.image), config["in_channels"])
    return {
        # A latent's channels are those of 2 x 2 pixels. ComfyUI counts the pixels last, the model counts them first.
        "hidden_states": rearrange(tokens, "b n (c p) -> b n (p c)", p=4),
        "timestep": 1 - step.timestep,
        "encoder_hidden_states": context,
        "image_positions": step.positions()[:, 1:],
        "text_positions": step.text_numbers,
    }


IDEOGRAM4 = Family(
    name="ideogram-4",
    model_class="Ideogram4Transformer2DModel",
    class_module="parallel_backend.families.models.ideogram4",
    native_classes=("Ideogram4",),
    file=FileLayout(
        detect=lambda shapes: "embed_image_indicator.weight" in shapes,
        configure=_configure,
        key_map=_key_map,
        max_settings={"rope_theta": 1 << 30},
    ),
    blocks=Blocks(
        lists=(BlockList(LAYERS, returns=("image",), joined=True, attention={"attention": JOINT}),),
        counts=lambda config: {LAYERS: config["num_layers"]},
        prologue=("input_proj", "llm_cond_norm", "llm_cond_proj"),
        epilogue=("final_layer",),
        segments=text_then_image,
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=("attention_mask",),
        token_tensors=("context",),
        example=lambda config, tokens: {"context": torch.randn(1, tokens, config["llm_features_dim"])},
    ),
    forward=Forward(
        arguments=_arguments,
        time_embed=TimeEmbed("t_embedding", model_time=lambda timestep: 1 - timestep),
        output=lambda tokens: -rearrange(tokens, "b n (p c) -> b n (c p)", p=4),
        cached_modules=cached(call=("t_embedding", "adaln_proj", "*.adaln_modulation", "final_layer.adaln_modulation")),
    ),
    tensor_plan={
        LAYERS: {
            **dict.fromkeys(_QKV, COLUMN_BY_HEADS),
            "attention.to_out.0": ROW_BY_HEADS,
            **dict.fromkeys(("feed_forward.w1", "feed_forward.w3"), COLUMN),
            "feed_forward.w2": ROW,
            "adaln_modulation": GATHER,
        }
    },
    patching=Patching(side=1),
)
