"""LongCat-Image (and Edit): Flux.1 without pooled text and guidance, joint sequence [text, image].

Text lies on a diagonal of rows and columns, and every picture behind its end, as ComfyUI's `LongCatImage._apply_model` has
it: the latent at index 1, reference pictures from 2 on. Key layouts: black-forest-labs/flux (which ComfyUI's files use) and
diffusers' LongCatImageTransformer2DModel.
"""

from typing import Any

import torch

from .base.blocks import BlockList, Blocks
from .base.family import CacheScope, Family, FileLayout, Forward, Inputs, Sizes, Source, TimeEmbed
from .base.patching import Patching
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import GATHER
from .parts.conditioning import text
from .parts.flux_blocks import (
    DOUBLE,
    DOUBLE_MODULATION,
    DOUBLE_PLAN,
    FEED_FORWARD,
    NATIVE_BLOCKS,
    NATIVE_PATCHES,
    SINGLE,
    SINGLE_PLAN,
    block_counts,
    diagonal,
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
    "time_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "context_embedder": "txt_in",
    "x_embedder": "img_in",
    "proj_out": "final_layer.linear",
}
_WEIGHT = ("weight",)
"""Of norms: ComfyUI's class reads them by diffusers' name alone. Those of Flux's files are renamed: _ALIASES."""
_ALIASES = {"_norm.scale": "_norm.weight"}
_NEEDED = ("double_blocks.0.img_mod.lin.weight", "double_blocks.0.img_mlp.0.weight", "single_blocks.0.linear1.weight")
_NOT_THERE = ("vector_in.in_layer.weight", "guidance_in.in_layer.weight")


def _detect(shapes: Shapes) -> bool:
    needed = (*_NEEDED, "txt_in.weight")
    return all(key in shapes for key in needed) and not any(key in shapes for key in _NOT_THERE)


def _configure(shapes: Shapes) -> Config:
    config = sizes(shapes)
    del config["out_channels"]  # those of its input
    return config | {"axes_dims_rope": rope_axes(config["attention_head_dim"])}


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    keys.copy(_OUTSIDE)
    keys.copy({"norm_out.linear": "final_layer.adaLN_modulation.1"}, swap_halves=True)
    double_keys(keys, config, FEED_FORWARD | DOUBLE_MODULATION, norms=_WEIGHT)
    single_keys(keys, config, {"norm.linear": "modulation.lin"}, norms=_WEIGHT)
    return keys.sources


def _arguments(step: StepInputs, _config: Config) -> dict[str, Any]:
    places = step.positions(step.text_tokens, step.text_tokens, front=1)
    return token_arguments(step) | {"img_ids": places, "txt_ids": diagonal(step)}


def _conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    words = text("LongCat-Image", config["joint_attention_dim"], given)
    behind = (1, words.shape[1], words.shape[1])
    scale, shift = scale_and_shift(given, behind)  # ComfyUI's BaseModel shifts positions in every call
    shift = tuple(own + more for own, more in zip(behind, shift, strict=True))
    references = reference_tensors(Patching(), given, method="offset", scale=scale, shift=shift)
    return {"context": words} | references | rope_tensors(given, behind)


LONGCAT_IMAGE = Family(
    name="longcat-image",
    model_class="LongCatImageTransformer2DModel",
    native_classes=("LongCatImage",),
    file=FileLayout(detect=_detect, configure=_configure, key_map=_key_map, aliases=_ALIASES),
    blocks=Blocks(
        lists=(BlockList(DOUBLE), BlockList(SINGLE)),
        counts=block_counts,
        prologue=("x_embedder", "context_embedder"),
        epilogue=("norm_out", "proj_out"),
        native=NATIVE_BLOCKS,
        native_patches=NATIVE_PATCHES,
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"] // 4),
    inputs=Inputs(conditioning=_conditioning, accepts=ACCEPTS, options=(OPTION,), token_tensors=("context",)),
    forward=Forward(
        arguments=_arguments,
        time_embed=TimeEmbed("time_embed", factor=1000.0),
        cached_modules={"pos_embed": CacheScope.BAND}
        | dict.fromkeys(
            ("time_embed", "*.norm1.linear", "*.norm1_context.linear", "*.norm.linear", "norm_out.linear"), CacheScope.CALL
        ),
    ),
    half_dtypes=lambda _config: ("bf16", "fp16"),
    tensor_plan={
        DOUBLE: DOUBLE_PLAN | {"norm1.linear": GATHER, "norm1_context.linear": GATHER},
        SINGLE: SINGLE_PLAN | {"norm.linear": GATHER},
    },
)
