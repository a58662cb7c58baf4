"""LongCat-Image (and Edit): Flux.1 without pooled text and guidance, joint sequence [text, image].

Positions are those of ComfyUI's `LongCatImage._apply_model`: words lie on a diagonal of rows and columns, pictures begin at
the row and column after the last word, the latent at index 1 and reference pictures at 2 and higher. Key layouts:
black-forest-labs/flux (which ComfyUI's files use) and diffusers' LongCatImageTransformer2DModel.
"""

from typing import Any

import torch

from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed
from .base.file_layout import FileLayout, Source
from .base.patching import Patching
from .base.step_inputs import Config, Shapes, StepInputs
from .parts import flux_blocks
from .parts.conditioning import text
from .parts.epsilons import UNNAMED
from .parts.key_map import WEIGHT, KeyMap
from .parts.references import ACCEPTS, reference_tensors
from .parts.rope import OPTION, rope_tensors

_ALIASES = {"_norm.scale": "_norm.weight"}
"""Flux's files name a norm's parameter `scale`. ComfyUI's class reads it by diffusers' name alone."""
_NEEDED = (
    "double_blocks.0.img_mod.lin.weight",
    "double_blocks.0.img_mlp.0.weight",
    "single_blocks.0.linear1.weight",
    "txt_in.weight",
)
_ABSENT = ("vector_in.in_layer.weight", "guidance_in.in_layer.weight")


def _detect(shapes: Shapes) -> bool:
    return all(key in shapes for key in _NEEDED) and not any(key in shapes for key in _ABSENT)


def _configure(shapes: Shapes) -> Config:
    config = flux_blocks.sizes(shapes)
    del config["out_channels"]  # the class gives as many as it takes in
    return config | {"axes_dims_rope": flux_blocks.rope_axes(config["attention_head_dim"])}


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    flux_blocks.outside_keys(keys, {"time_embed.timestep_embedder": "time_in"})
    flux_blocks.double_keys(keys, config, flux_blocks.FEED_FORWARD | flux_blocks.DOUBLE_MODULATION, norms=WEIGHT)
    flux_blocks.single_keys(keys, config, flux_blocks.SINGLE_MODULATION, norms=WEIGHT)
    return keys.sources


def _arguments(step: StepInputs, _config: Config) -> dict[str, Any]:
    places = step.positions(step.text_tokens, step.text_tokens, front=1)
    return flux_blocks.token_arguments(step) | {"img_ids": places, "txt_ids": flux_blocks.diagonal(step)}


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    words = text("LongCat-Image", config["joint_attention_dim"], call)
    behind = (1.0, float(words.shape[1]), float(words.shape[1]))  # ComfyUI's BaseModel shifts positions in every call
    references = reference_tensors(Patching(), call, method="offset", usual=behind)
    return {"context": words} | references | rope_tensors(call, behind)


LONGCAT_IMAGE = Family(
    name="longcat-image",
    model_class="LongCatImageTransformer2DModel",
    native_classes=("LongCatImage",),
    file=FileLayout(detect=_detect, configure=_configure, key_map=_key_map, aliases=_ALIASES),
    blocks=flux_blocks.BLOCKS,
    sizes=Sizes(latent_channels=lambda config: config["in_channels"] // 4),
    inputs=Inputs(conditioning=_conditioning, accepts=ACCEPTS, options=(OPTION,), token_tensors=("context",)),
    forward=Forward(
        arguments=_arguments,
        time_embed=TimeEmbed("time_embed", factor=1000.0),
        cached_modules=flux_blocks.cached_modules("time_embed"),
    ),
    half_dtypes=lambda _config: ("bf16", "fp16"),
    tensor_plan=flux_blocks.MODULATED_PLAN,
    epsilons=UNNAMED,
)
