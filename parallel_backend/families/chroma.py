"""Chroma (Chroma1): Flux.1's blocks without modulation layers of their own, joint sequence [text, image].

All modulation comes from one small network in front of the blocks, which numbers it by block. Every text token is attended
to, as in ComfyUI's model; diffusers' pipeline hides padding tokens but one. Key layouts: lodestones/Chroma (which ComfyUI's
files use) and diffusers' ChromaTransformer2DModel.
"""

from typing import Any

import torch

from .base.blocks import BlockList, Blocks
from .base.family import CacheScope, Family, FileLayout, Forward, Inputs, Sizes, Source, TimeEmbed
from .base.step_inputs import Config, Shapes
from .parts.conditioning import count_blocks, text
from .parts.flux_blocks import (
    DOUBLE,
    DOUBLE_PLAN,
    FEED_FORWARD,
    NATIVE_BLOCKS,
    NORM_ALIASES,
    SCALE,
    SINGLE,
    SINGLE_PLAN,
    block_counts,
    double_keys,
    rope_axes,
    single_keys,
    sizes,
    token_arguments,
)
from .parts.key_map import KeyMap

APPROXIMATOR = "distilled_guidance_layer."
APPROXIMATOR_LAYERS = 5
"""Layers of that network in every Chroma, as ComfyUI takes for granted. For the aliases of its norms only."""


def _detect(shapes: Shapes) -> bool:
    # Chroma Radiance has the same network and blocks, and makes pixels instead of latents.
    needed = (f"{APPROXIMATOR}in_proj.weight", "double_blocks.0.img_attn.qkv.weight", "img_in.weight", "txt_in.weight")
    return all(key in shapes for key in needed) and not any(key.startswith("nerf_") for key in shapes)


def _configure(shapes: Shapes) -> Config:
    config = sizes(shapes)
    hidden, channels = shapes[f"{APPROXIMATOR}in_proj.weight"]
    return config | {
        "approximator_num_channels": channels,
        "approximator_hidden_dim": hidden,
        "approximator_layers": count_blocks(shapes, f"{APPROXIMATOR}layers."),
        "axes_dims_rope": rope_axes(config["attention_head_dim"]),
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    keys.copy({"context_embedder": "txt_in", "x_embedder": "img_in", "proj_out": "final_layer.linear"})
    network = keys.inside(APPROXIMATOR, APPROXIMATOR)
    network.same("in_proj", "out_proj")
    for index in range(config["approximator_layers"]):
        layer = f"layers.{index}."
        network.copy({f"{layer}linear_1": f"{layer}in_layer", f"{layer}linear_2": f"{layer}out_layer"})
        network.same(f"norms.{index}", parameters=SCALE)
    double_keys(keys, config, FEED_FORWARD)
    single_keys(keys, config, {})
    return keys.sources


def _conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    guidance = given.get("guidance")
    if guidance is not None and guidance.any():
        raise ValueError(
            "positive, negative: this conditioning has embedded guidance other than 0, which Chroma was not trained with. "
            "Remove the FluxGuidance node or set it to 0, and use the sampler's cfg."
        )
    return {"context": text("Chroma", config["joint_attention_dim"], given)}


CHROMA = Family(
    name="chroma",
    model_class="ChromaTransformer2DModel",
    native_classes=("Chroma",),
    file=FileLayout(
        detect=_detect,
        configure=_configure,
        key_map=_key_map,
        aliases=NORM_ALIASES
        | {f"{APPROXIMATOR}norms.{i}.weight": f"{APPROXIMATOR}norms.{i}.scale" for i in range(APPROXIMATOR_LAYERS)},
    ),
    blocks=Blocks(
        lists=(BlockList(DOUBLE), BlockList(SINGLE, joined=True)),
        counts=block_counts,
        prologue=("x_embedder", "context_embedder"),
        epilogue=("norm_out", "proj_out"),
        residuals={"input": DOUBLE, "output": SINGLE},
        native=NATIVE_BLOCKS,
        native_patches=("attn1_patch", "attn1_output_patch"),
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"] // 4),
    inputs=Inputs(conditioning=_conditioning, token_tensors=("context",)),
    forward=Forward(
        arguments=lambda step, _config: token_arguments(step),
        # The module around this one computes in the timestep's dtype, which must stay the weights'.
        time_embed=TimeEmbed("time_text_embed.time_proj", factor=1000.0),
        cached_modules={
            "pos_embed": CacheScope.BAND,
            "time_text_embed": CacheScope.CALL,
            "distilled_guidance_layer": CacheScope.CALL,
        },
    ),
    half_dtypes=lambda _config: ("bf16", "fp16"),
    tensor_plan={DOUBLE: DOUBLE_PLAN, SINGLE: SINGLE_PLAN},
)
