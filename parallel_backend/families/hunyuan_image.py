"""HunyuanImage 2.1: double blocks, then single ones, on latents of 1/32 of the picture's sides.

Joint sequence [image, text]. The text is ByT5's tokens of quoted words, if there are any, and the prompt, whose refiner
takes the whole prompt. Key layouts: ComfyUI's, Tencent's, and diffusers' HunyuanImageTransformer2DModel. The forward is
models/hunyuan.py.
"""

from dataclasses import replace
from typing import Any

import torch

from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed
from .base.file_layout import FileLayout, Source
from .base.patching import Patching
from .base.step_inputs import Config, Shapes
from .parts import flux_blocks, hunyuan
from .parts.conditioning import count_blocks
from .parts.key_map import KeyMap

NAME = "HunyuanImage 2.1"
_DISTILLED = f"a distilled {NAME} (mean flow, embedded guidance), which this version cannot run. Use the base model."


def _configure(shapes: Shapes) -> Config:
    if "time_r_in.in_layer.weight" in shapes or "guidance_in.in_layer.weight" in shapes:
        raise ValueError(f"model_name: this is {_DISTILLED}")
    if (patch := list(shapes["img_in.proj.weight"][2:])) != [1, 1]:
        raise ValueError(f"model_name: this is a {NAME} with patches of {patch}, which this version cannot run.")
    config = hunyuan.sizes(shapes)
    return config | {
        "out_channels": shapes["final_layer.linear.weight"][0],
        "num_single_layers": count_blocks(shapes, "single_blocks."),
        "text_embed_2_dim": shapes.get("byt5_in.layernorm.weight", (None,))[0],
        "rope_axes_dim": (config["attention_head_dim"] // 2,) * 2,
        "guidance_embeds": False,
    }


def _key_map(config: Config) -> dict[str, Source]:
    if config.get("use_meanflow") or config["guidance_embeds"]:
        raise ValueError(f"model_name: this folder is {_DISTILLED}")
    keys = KeyMap()
    hunyuan.outside_keys(keys, config, {"time_guidance_embed.timestep_embedder": "time_in"})
    if config["text_embed_2_dim"] is not None:
        hunyuan.glyph_keys(keys)
    flux_blocks.double_keys(keys, config, flux_blocks.FEED_FORWARD | flux_blocks.DOUBLE_MODULATION)
    flux_blocks.single_keys(keys, config, flux_blocks.SINGLE_MODULATION)
    return keys.sources


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    if config["text_embed_2_dim"] is None:
        call = {name: value for name, value in call.items() if name != "txt_byt5"}  # as the native model does
    return hunyuan.unmasked_text(NAME, config, call)


HUNYUAN_IMAGE = Family(
    name="hunyuan-image-2.1",
    model_class="HunyuanImageTransformer2DModel",
    class_module="parallel_backend.families.models.hunyuan",
    native_classes=("HunyuanImage21",),
    file=FileLayout(
        detect=lambda shapes: hunyuan.has_refiner(shapes) and not hunyuan.is_video_15(shapes) and hunyuan.is_image(shapes),
        configure=_configure,
        key_map=_key_map,
        aliases=hunyuan.ALIASES,
    ),
    blocks=replace(hunyuan.BLOCKS, prologue=("x_embedder", "context_embedder", "context_embedder_2")),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=("guidance", "attention_mask", "txt_byt5"),
        token_tensors=("context", "glyphs"),
        example=lambda config, tokens: {"context": torch.randn(1, tokens, config["text_embed_dim"])},
    ),
    forward=Forward(
        arguments=hunyuan.unmasked_arguments,
        whole_latent=True,
        time_embed=TimeEmbed("time_guidance_embed"),
        cached_modules=hunyuan.cached_modules("time_guidance_embed"),
    ),
    tensor_plan=flux_blocks.MODULATED_PLAN,
    patching=Patching(side=1),
)
