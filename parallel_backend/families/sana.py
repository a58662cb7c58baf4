"""Sana 1.0 and 1.5: linear attention, convolutions in the feed-forward. Sequence and batch parallelism only.

Key layouts: NVIDIA's SanaMS and diffusers' SanaTransformer2DModel. ComfyUI has no Sana: it runs from Python alone.
"""

import math
from typing import Any

import torch

from parallel_backend.families.base.blocks import LINEAR, NEIGHBOURS, BlockList, Blocks
from parallel_backend.families.base.family import CacheScope, Family, FileLayout, Forward, Inputs, Sizes, Source
from parallel_backend.families.base.patching import Patching
from parallel_backend.families.base.step_inputs import Config, Rows, Shapes, StepInputs
from parallel_backend.families.parts.conditioning import count_blocks, text
from parallel_backend.families.parts.cross_attention import TEXT_KEYS
from parallel_backend.families.parts.key_map import KeyMap
from parallel_backend.families.parts.pixart_keys import UNUSED, block_keys, model_keys

HEAD, CROSS_HEAD, CROSS_HEAD_OF_600M = 32, 112, 72
"""Widths of heads in self- and cross-attention. Nothing in the weights shows them, but the 600M is known by its width."""
WIDTH_OF_600M = 1152
SIDE_WITH_POSITIONS = 64
"""Side of the latent that a model was trained with, from which on it has positions."""
BLOCKS = "transformer_blocks"


def _configure(shapes: Shapes) -> Config:
    width, channels, patch, _ = shapes["x_embedder.proj.weight"]
    cross = CROSS_HEAD_OF_600M if width == WIDTH_OF_600M else CROSS_HEAD
    side = math.isqrt(shapes["pos_embed"][-2]) * patch if "pos_embed" in shapes else SIDE_WITH_POSITIONS // 2
    return {
        "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // patch**2,
        "num_attention_heads": width // HEAD,
        "attention_head_dim": HEAD,
        "num_layers": count_blocks(shapes, "blocks."),
        "num_cross_attention_heads": width // cross,
        "cross_attention_head_dim": cross,
        "cross_attention_dim": width,
        "caption_channels": shapes["y_embedder.y_proj.fc1.weight"][1],
        "mlp_ratio": shapes["blocks.0.mlp.point_conv.conv.weight"][1] / width,
        "attention_bias": "blocks.0.attn.qkv.bias" in shapes,
        "sample_size": side,
        "patch_size": patch,
        "interpolation_scale": None if side < SIDE_WITH_POSITIONS else side / SIDE_WITH_POSITIONS,
        "guidance_embeds": "cfg_embedder.mlp.0.weight" in shapes,
        "qk_norm": "rms_norm_across_heads" if "blocks.0.attn.q_norm.weight" in shapes else None,
    }


def _key_map(config: Config) -> dict[str, Source]:
    if config["guidance_embeds"]:
        raise ValueError("model_name: this is Sana Sprint, which this version cannot run. Use a Sana 1.0 or 1.5 model.")
    keys = model_keys(config, "patch_embed", "time_embed")
    keys.copy({"caption_norm": "attention_y_norm"}, ("weight",))
    for index in range(config["num_layers"]):
        block = block_keys(keys, config, index)
        block.copy({"ff.conv_inverted": "mlp.inverted_conv.conv", "ff.conv_depth": "mlp.depth_conv.conv"})
        block.copy({"ff.conv_point": "mlp.point_conv.conv"}, ("weight",))
        if config["qk_norm"] is not None:
            _norms(block)
    return keys.sources


def _norms(block: KeyMap) -> None:
    for ours, theirs in {"attn1": "attn", "attn2": "cross_attn"}.items():
        block.copy({f"{ours}.norm_{part}": f"{theirs}.{part}_norm" for part in "qk"}, ("weight",))


def _conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context` [B, T, caption_channels] and, where there is one, the mask of its tokens [B, T]."""
    mask = given.get("attention_mask")
    return {"context": text("Sana", config["caption_channels"], given)} | ({} if mask is None else {"mask": mask})


def _arguments(step: StepInputs, _config: Config) -> dict[str, Any]:
    return {
        "hidden_states": step.x,
        "encoder_hidden_states": step.tensors["context"],
        "timestep": step.timestep,
        "encoder_attention_mask": step.tensors.get("mask"),
    }


def _tokens(_width: int, rows: Rows) -> int:
    return rows.image.stop - rows.image.start


SANA = Family(
    name="sana",
    model_class="SanaTransformer2DModel",
    native_classes=(),
    file=FileLayout(
        detect=lambda shapes: "t_block.1.weight" in shapes and "blocks.0.mlp.depth_conv.conv.weight" in shapes,
        configure=_configure,
        key_map=_key_map,
        ignored=UNUSED,
        max_settings={"sample_size": 512},
    ),
    blocks=Blocks(
        lists=(
            BlockList(
                BLOCKS,
                returns=("image",),
                cuts={"height": lambda _height, _rows: 1, "width": _tokens},  # of the picture that the feed-forward is given
                attention={"attn1": LINEAR, "ff": NEIGHBOURS},
            ),
        ),
        counts=lambda config: {BLOCKS: config["num_layers"]},
        prologue=("patch_embed",),
        epilogue=("norm_out", "proj_out"),
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=("attention_mask",),
        vector_tensors=("context", "mask"),
        example=lambda config, text_tokens: {"context": torch.randn(1, text_tokens, config["caption_channels"])},
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        cached_modules={"caption_projection": CacheScope.PROMPT} | TEXT_KEYS,
    ),
    tensor_plan={},
    patching=Patching(side=1),
    unsupported=("pipe", "tensor", "patch"),
)
