"""Flux.1 (dev, schnell, Kontext; fill, canny, depth with pictures in their channels): double blocks, then single ones.

Joint sequence [text, image]. Key layouts: black-forest-labs/flux (which ComfyUI's files use) and diffusers'
FluxTransformer2DModel.
"""

from dataclasses import replace
from typing import Any

import torch

from .base.blocks import Projections
from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed
from .base.file_layout import FileLayout, Source
from .base.patching import Patching
from .base.step_inputs import Config, Shapes, StepInputs
from .parts import flux_blocks
from .parts.conditioning import embedded_guidance, example, joint_widths, text_and_pooled
from .parts.epsilons import UNNAMED
from .parts.key_map import KeyMap
from .parts.references import ACCEPTS, METHODS, UXO, reference_tensors
from .parts.rope import OPTION, rope_tensors

_EMBEDDERS = {  # diffusers module <- original module
    "time_text_embed.timestep_embedder": "time_in",
    "time_text_embed.text_embedder": "vector_in",
}
_GUIDANCE = {"time_text_embed.guidance_embedder": "guidance_in"}
_NEEDED = (
    "double_blocks.0.img_mod.lin.weight",  # not in Chroma, Flux.2
    "single_blocks.0.linear1.weight",
    "vector_in.in_layer.weight",  # not in LongCat, Ovis
    "txt_in.weight",  # HunyuanVideo refines its text
)


def _configure(shapes: Shapes) -> Config:
    config = flux_blocks.sizes(shapes)
    return config | {
        "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "axes_dims_rope": flux_blocks.rope_axes(config["attention_head_dim"]),
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    flux_blocks.outside_keys(keys, _EMBEDDERS | (_GUIDANCE if config["guidance_embeds"] else {}))
    flux_blocks.double_keys(keys, config, flux_blocks.FEED_FORWARD | flux_blocks.DOUBLE_MODULATION)
    flux_blocks.single_keys(keys, config, flux_blocks.SINGLE_MODULATION)
    return keys.sources


def _arguments(step: StepInputs, _config: Config) -> dict[str, Any]:
    vectors = {"pooled_projections": step.tensors["pooled"], "guidance": step.tensors.get("guidance")}
    return flux_blocks.token_arguments(step) | vectors


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    if call.get("y") is None and getattr(call.get("context"), "ndim", 0) == 3:  # ComfyUI's class takes zeros
        call = call | {"y": call["context"].new_zeros(len(call["context"]), config["pooled_projection_dim"])}
    tensors = text_and_pooled("Flux", "DualCLIPLoader of type flux (CLIP-L and T5)", joint_widths(config), call)
    references = reference_tensors(Patching(), call, method="offset", methods=(*METHODS, UXO))
    return tensors | references | rope_tensors(call) | embedded_guidance(config, call)


def _example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    guidance = {"guidance": torch.full((1,), 3.5)} if config["guidance_embeds"] else {}
    return example(joint_widths(config), text_tokens) | guidance


FILL_CHANNELS = 384
"""Input channels of a token of Flux fill, which overflows in fp16: 96 in each of the token's 4 latent pixels."""

FLUX = Family(
    name="flux",
    model_class="FluxTransformer2DModel",
    fused_module="parallel_backend.families.models.fused_flux",
    native_classes=("Flux", "FluxInpaint", "FluxSchnell"),
    file=FileLayout(
        detect=lambda shapes: all(key in shapes for key in _NEEDED),
        configure=_configure,
        key_map=_key_map,
        aliases=flux_blocks.NORM_ALIASES,
    ),
    blocks=replace(
        flux_blocks.BLOCKS,
        lists=tuple(replace(spec, projections=Projections()) for spec in flux_blocks.BLOCKS.lists),
        residuals={"input": flux_blocks.DOUBLE, "output": flux_blocks.SINGLE},
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
        cached_modules=flux_blocks.cached_modules("time_text_embed"),
    ),
    half_dtypes=lambda config: ("bf16",) if config["in_channels"] == FILL_CHANNELS else ("bf16", "fp16"),
    tensor_plan=flux_blocks.MODULATED_PLAN,
    epsilons=UNNAMED,
)
