"""HunyuanImage 2.1: double blocks, then single ones, on latents of 1/32 of the picture's sides.

Joint sequence [image, text]; the text is ByT5's view of quoted words, if there are any, and the prompt, whose refiner takes
the whole of it. Key layouts: ComfyUI's, Tencent's, and diffusers' HunyuanImageTransformer2DModel, whose forward is ours.
"""

from typing import Any

import torch

from .base.blocks import BlockList, Blocks
from .base.family import Family, FileLayout, Forward, Inputs, Sizes, Source, TimeEmbed
from .base.patching import Patching
from .base.step_inputs import Config, Shapes, StepInputs, image_tables
from .base.tensor_plan import GATHER
from .parts.conditioning import count_blocks
from .parts.flux_blocks import (
    DOUBLE,
    DOUBLE_PLAN,
    FEED_FORWARD,
    NATIVE_BLOCKS,
    SINGLE,
    SINGLE_PLAN,
    block_counts,
    double_keys,
    single_keys,
)
from .parts.hunyuan import (
    ALIASES,
    MODULATION,
    SINGLE_MODULATION,
    glyph_keys,
    has_refiner,
    is_image,
    is_video_15,
    outside_keys,
    per_call,
    sizes,
    unmasked_text,
)
from .parts.key_map import KeyMap

NAME = "HunyuanImage 2.1"
_DISTILLED = f"a distilled {NAME} (mean flow, embedded guidance), which this version cannot run. Use the base model."


def _configure(shapes: Shapes) -> Config:
    if "time_r_in.in_layer.weight" in shapes or "guidance_in.in_layer.weight" in shapes:
        raise ValueError(f"model_name: this is {_DISTILLED}")
    if (patch := list(shapes["img_in.proj.weight"][2:])) != [1, 1]:
        raise ValueError(f"model_name: this is a {NAME} with patches of {patch}, which this version cannot run.")
    config = sizes(shapes)
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
    outside_keys(keys, config, {"time_guidance_embed.timestep_embedder": "time_in"})
    if config["text_embed_2_dim"] is not None:
        glyph_keys(keys)
    double_keys(keys, config, FEED_FORWARD | MODULATION)
    single_keys(keys, config, SINGLE_MODULATION)
    return keys.sources


def _conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    if config["text_embed_2_dim"] is None:
        given = {name: value for name, value in given.items() if name != "txt_byt5"}  # as the native model does
    return unmasked_text(NAME, config, given)


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    return {
        "hidden_states": step.x,
        "timestep": step.timestep,
        "encoder_hidden_states": step.text_tensor("context", config["text_embed_dim"]),
        "encoder_hidden_states_2": step.tensors.get("glyphs"),
    }


def _blocks(name: str) -> BlockList:
    return BlockList(name, returns=("image", "text"), cuts={"image_rotary_emb": image_tables(0)}, needs_text=True)


HUNYUAN_IMAGE = Family(
    name="hunyuan-image-2.1",
    model_class="HunyuanImageTransformer2DModel",
    class_module="parallel_backend.families.models.hunyuan",
    native_classes=("HunyuanImage21",),
    file=FileLayout(
        detect=lambda shapes: has_refiner(shapes) and not is_video_15(shapes) and is_image(shapes),
        configure=_configure,
        key_map=_key_map,
        aliases=ALIASES,
    ),
    blocks=Blocks(
        lists=(_blocks(DOUBLE), _blocks(SINGLE)),
        counts=block_counts,
        prologue=("x_embedder", "context_embedder", "context_embedder_2"),
        epilogue=("norm_out", "proj_out"),
        text_first=False,
        residuals={"input": DOUBLE, "output": SINGLE},
        native=NATIVE_BLOCKS,
        native_patches=("attn1_patch", "attn1_output_patch"),
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=("guidance", "attention_mask", "txt_byt5"),
        token_tensors=("context", "glyphs"),
        example=lambda config, tokens: {"context": torch.randn(1, tokens, config["text_embed_dim"])},
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        time_embed=TimeEmbed("time_guidance_embed"),
        cached_modules=per_call("time_guidance_embed"),
    ),
    tensor_plan={
        DOUBLE: DOUBLE_PLAN | dict.fromkeys(MODULATION, GATHER),
        SINGLE: SINGLE_PLAN | dict.fromkeys(SINGLE_MODULATION, GATHER),
    },
    patching=Patching(side=1),
)
