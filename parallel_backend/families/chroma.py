"""Chroma (Chroma1): Flux.1's blocks without modulation layers of their own, joint sequence [text, image].

One small network in front of the blocks makes the modulation of every block. Every text token is attended to, as in
ComfyUI's model; diffusers' pipeline masks all padding tokens but one. Key layouts: lodestones/Chroma (which ComfyUI's files
use) and diffusers' ChromaTransformer2DModel.
"""

from dataclasses import replace
from typing import Any

import torch

from .base.blocks import BlockList
from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed, cached
from .base.file_layout import FileLayout, Source
from .base.step_inputs import Config, Shapes
from .parts import flux_blocks
from .parts.conditioning import count_blocks, text
from .parts.epsilons import UNNAMED
from .parts.key_map import KeyMap

APPROXIMATOR = "distilled_guidance_layer."
APPROXIMATOR_LAYERS = 5
"""Layers of that network in every Chroma. Read for the aliases of its norms only, which exist before a file is opened."""


def _detect(shapes: Shapes) -> bool:
    # Chroma Radiance has the same network and blocks, and makes pixels instead of latents.
    needed = (f"{APPROXIMATOR}in_proj.weight", "double_blocks.0.img_attn.qkv.weight", "img_in.weight", "txt_in.weight")
    return all(key in shapes for key in needed) and not any(key.startswith("nerf_") for key in shapes)


def _configure(shapes: Shapes) -> Config:
    config = flux_blocks.sizes(shapes)
    hidden, channels = shapes[f"{APPROXIMATOR}in_proj.weight"]
    return config | {
        "approximator_num_channels": channels,
        "approximator_hidden_dim": hidden,
        "approximator_layers": count_blocks(shapes, f"{APPROXIMATOR}layers."),
        "axes_dims_rope": flux_blocks.rope_axes(config["attention_head_dim"]),
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    keys.copy(flux_blocks.OUTSIDE)
    network = keys.inside(APPROXIMATOR, APPROXIMATOR)
    network.same("in_proj", "out_proj")
    for index in range(config["approximator_layers"]):
        flux_blocks.embedder_keys(network, {f"layers.{index}": f"layers.{index}"})
        network.same(f"norms.{index}", parameters=flux_blocks.SCALE)
    flux_blocks.double_keys(keys, config, flux_blocks.FEED_FORWARD)
    flux_blocks.single_keys(keys, config, {})
    return keys.sources


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    guidance = call.get("guidance")
    if guidance is not None and guidance.any():
        raise ValueError(
            "positive, negative: this conditioning has embedded guidance other than 0, which Chroma was not trained with. "
            "Remove the FluxGuidance node or set it to 0, and use the sampler's cfg."
        )
    return {"context": text("Chroma", config["joint_attention_dim"], call)}


CHROMA = Family(
    name="chroma",
    model_class="ChromaTransformer2DModel",
    native_classes=("Chroma",),
    file=FileLayout(
        detect=_detect,
        configure=_configure,
        key_map=_key_map,
        aliases=flux_blocks.NORM_ALIASES
        | {f"{APPROXIMATOR}norms.{i}.weight": f"{APPROXIMATOR}norms.{i}.scale" for i in range(APPROXIMATOR_LAYERS)},
    ),
    blocks=replace(
        flux_blocks.BLOCKS,
        lists=(BlockList(flux_blocks.DOUBLE), BlockList(flux_blocks.SINGLE, joined=True)),
        residuals={"input": flux_blocks.DOUBLE, "output": flux_blocks.SINGLE},
        native_patches=("attn1_patch", "attn1_output_patch"),
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"] // 4),
    inputs=Inputs(conditioning=_conditioning, token_tensors=("context",)),
    forward=Forward(
        arguments=lambda step, _config: flux_blocks.token_arguments(step),
        # `time_text_embed` computes in its argument's dtype, which must be the weights'. So its inner module, which only
        # makes sines and cosines, is handed the float32 timestep.
        time_embed=TimeEmbed("time_text_embed.time_proj", factor=1000.0),
        cached_modules=cached(call=("time_text_embed", "distilled_guidance_layer"), band=("pos_embed",)),
    ),
    half_dtypes=lambda _config: ("bf16", "fp16"),
    tensor_plan={flux_blocks.DOUBLE: flux_blocks.DOUBLE_PLAN, flux_blocks.SINGLE: flux_blocks.SINGLE_PLAN},
    epsilons=UNNAMED,
)
