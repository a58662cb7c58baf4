"""Flux.1 (dev, schnell, Kontext; fill, canny, depth with pictures in their channels): double blocks, then single ones.

Joint sequence [text, image]. Key layouts: black-forest-labs/flux (which ComfyUI's files use) and diffusers'
FluxTransformer2DModel.
"""

from typing import Any

import torch

from .base.blocks import BlockList, Blocks
from .base.family import CacheScope, Family, FileLayout, Forward, Inputs, Sizes, Source, TimeEmbed
from .base.patching import Patching
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import GATHER
from .parts.conditioning import embedded_guidance, example, text_and_pooled
from .parts.flux_blocks import (
    DOUBLE,
    DOUBLE_MODULATION,
    DOUBLE_PLAN,
    FEED_FORWARD,
    NATIVE_BLOCKS,
    NATIVE_PATCHES,
    NORM_ALIASES,
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
from .parts.references import ACCEPTS, reference_tensors
from .parts.rope import OPTION, rope_tensors, scale_and_shift

_OUTSIDE = {  # diffusers module <- original module
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "context_embedder": "txt_in",
    "x_embedder": "img_in",
    "proj_out": "final_layer.linear",
}
_GUIDANCE = {
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
}
_NEEDED = (
    "double_blocks.0.img_mod.lin.weight",  # not in Chroma, Flux.2
    "single_blocks.0.linear1.weight",
    "vector_in.in_layer.weight",  # not in LongCat, Ovis
    "txt_in.weight",  # HunyuanVideo refines its text
)


def _configure(shapes: Shapes) -> Config:
    config = sizes(shapes)
    return config | {
        "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "axes_dims_rope": rope_axes(config["attention_head_dim"]),
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    keys.copy(_OUTSIDE | (_GUIDANCE if config["guidance_embeds"] else {}))
    keys.copy({"norm_out.linear": "final_layer.adaLN_modulation.1"}, swap_halves=True)
    double_keys(keys, config, FEED_FORWARD | DOUBLE_MODULATION)
    single_keys(keys, config, {"norm.linear": "modulation.lin"})
    return keys.sources


def _arguments(step: StepInputs, _config: Config) -> dict[str, Any]:
    vectors = {"pooled_projections": step.tensors["pooled"], "guidance": step.tensors.get("guidance")}
    return token_arguments(step) | vectors


def _conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = text_and_pooled("Flux", "DualCLIPLoader of type flux (CLIP-L and T5)", config, given)
    scale, shift = scale_and_shift(given)
    references = reference_tensors(Patching(), given, method="offset", scale=scale, shift=shift)
    return tensors | references | rope_tensors(given) | embedded_guidance(config, given)


def _example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    guidance = {"guidance": torch.full((1,), 3.5)} if config["guidance_embeds"] else {}
    return example(config, text_tokens) | guidance


FILL_CHANNELS = 384
"""Of the input of Flux fill, which overflows in fp16: 96 in each of the 4 pixels of a token."""

FLUX = Family(
    name="flux",
    model_class="FluxTransformer2DModel",
    native_classes=("Flux", "FluxInpaint", "FluxSchnell"),
    file=FileLayout(
        detect=lambda shapes: all(key in shapes for key in _NEEDED),
        configure=_configure,
        key_map=_key_map,
        aliases=NORM_ALIASES,
    ),
    blocks=Blocks(
        lists=(BlockList(DOUBLE), BlockList(SINGLE)),
        counts=block_counts,
        prologue=("x_embedder", "context_embedder"),
        epilogue=("norm_out", "proj_out"),
        residuals={"input": DOUBLE, "output": SINGLE},
        native=NATIVE_BLOCKS,
        native_patches=NATIVE_PATCHES,
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"] // 4),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=("y", "guidance", *ACCEPTS),
        options=(OPTION,),
        token_tensors=("context",),
        vector_tensors=("pooled", "guidance"),
        example=_example,
    ),
    forward=Forward(
        arguments=_arguments,
        time_embed=TimeEmbed("time_text_embed", factor=1000.0),
        cached_modules={
            "pos_embed": CacheScope.BAND,
            "time_text_embed": CacheScope.CALL,
            "*.norm1.linear": CacheScope.CALL,
            "*.norm1_context.linear": CacheScope.CALL,
            "*.norm.linear": CacheScope.CALL,
            "norm_out.linear": CacheScope.CALL,
        },
    ),
    half_dtypes=lambda config: ("bf16",) if config["in_channels"] == FILL_CHANNELS else ("bf16", "fp16"),
    tensor_plan={
        DOUBLE: DOUBLE_PLAN | {"norm1.linear": GATHER, "norm1_context.linear": GATHER},
        SINGLE: SINGLE_PLAN | {"norm.linear": GATHER},
    },
)
