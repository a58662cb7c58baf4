"""HunyuanVideo (text to video; I2V v1 and SkyReels, with the picture in their channels): double blocks, then single ones.

Joint sequence [image, text]. The text's refiner takes the whole text: it runs on every rank of the first stage, for every
band anew. Key layouts: ComfyUI's, Tencent's, diffusers' HunyuanVideoTransformer3DModel.
"""

from typing import Any

import torch

from .base.blocks import BlockList, Blocks
from .base.family import Family, FileLayout, Forward, Inputs, Sizes, Source, TimeEmbed
from .base.patching import Patching
from .base.step_inputs import TEXT_MASK, Config, Shapes, StepInputs, image_tables
from .base.tensor_plan import GATHER
from .parts.conditioning import count_blocks, embedded_guidance, example, text_and_pooled
from .parts.flux_blocks import (
    DOUBLE,
    DOUBLE_PLAN,
    FEED_FORWARD,
    NATIVE_BLOCKS,
    SINGLE,
    SINGLE_PLAN,
    block_counts,
    double_keys,
    rope_axes,
    single_keys,
)
from .parts.hunyuan import (
    ALIASES,
    MODULATION,
    SINGLE_MODULATION,
    has_refiner,
    is_image,
    is_video_15,
    outside_keys,
    per_call,
    sizes,
)
from .parts.key_map import KeyMap

PATCH = [1, 2, 2]
_EMBEDDERS = {  # diffusers module <- original module, two layers each
    "time_text_embed.timestep_embedder": "time_in",
    "time_text_embed.text_embedder": "vector_in",
}
_GUIDANCE = {"time_text_embed.guidance_embedder": "guidance_in"}


def _configure(shapes: Shapes) -> Config:
    patch, other = list(shapes["img_in.proj.weight"][2:]), None
    if "vector_in.in_layer.weight" not in shapes:
        other = "HunyuanImage 2.1's refiner"
    elif patch != PATCH:
        other = f"a HunyuanVideo with patches of {patch} instead of {PATCH}"
    if other is not None:
        raise ValueError(f"model_name: this is {other}, which this version cannot run. Use a HunyuanVideo T2V or I2V model.")
    config = sizes(shapes)
    return config | {
        "out_channels": shapes["final_layer.linear.weight"][0] // 4,
        "num_single_layers": count_blocks(shapes, "single_blocks."),
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
        "rope_axes_dim": rope_axes(config["attention_head_dim"]),
    }


def _key_map(config: Config) -> dict[str, Source]:
    """ValueError for a model that diffusers' class computes otherwise than ComfyUI's."""
    if config.get("image_condition_type") == "token_replace":
        raise ValueError(
            "model_name: this folder's config.json says token_replace, which ComfyUI computes otherwise than diffusers. Use "
            "an I2V model that takes the picture in its channels (latent_concat), or a native loader."
        )
    keys = KeyMap()
    outside_keys(keys, config, _EMBEDDERS | (_GUIDANCE if config["guidance_embeds"] else {}))
    double_keys(keys, config, FEED_FORWARD | MODULATION)
    single_keys(keys, config, SINGLE_MODULATION)
    return keys.sources


def _text(config: Config) -> Config:
    """The configuration with the name that other classes have for the text's width."""
    return {**config, "joint_attention_dim": config["text_embed_dim"]}


def _conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = text_and_pooled("HunyuanVideo", "DualCLIPLoader of type hunyuan_video", _text(config), given)
    mask = given.get("attention_mask")
    if mask is not None and not mask.bool().all():
        tensors[TEXT_MASK] = mask.bool()
    return tensors | embedded_guidance(config, given)


def _example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    guidance = {"guidance": torch.full((1,), 6.0)} if config["guidance_embeds"] else {}
    return example(_text(config), text_tokens) | guidance


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    words = step.text_tensor("context", config["text_embed_dim"])
    mask = step.tensors.get(TEXT_MASK)
    return {
        "hidden_states": step.x,
        "encoder_hidden_states": words,
        "encoder_attention_mask": words.new_ones(words.shape[:2], dtype=torch.bool) if mask is None else mask,
        "pooled_projections": step.tensors["pooled"],
        "timestep": step.timestep,
        "guidance": step.tensors.get("guidance"),
    }


def _blocks(name: str, rotary: str) -> BlockList:
    return BlockList(name, returns=("image", "text"), cuts={rotary: image_tables(0)}, needs_text=True)


class _Forward(Forward):
    drops_mask = True


HUNYUAN_VIDEO = Family(
    name="hunyuan-video",
    model_class="HunyuanVideoTransformer3DModel",
    native_classes=("HunyuanVideo", "HunyuanVideoI2V", "HunyuanVideoSkyreelsI2V"),
    file=FileLayout(
        detect=lambda shapes: has_refiner(shapes) and not (is_video_15(shapes) or is_image(shapes)),
        configure=_configure,
        key_map=_key_map,
        aliases=ALIASES,
    ),
    blocks=Blocks(
        lists=(_blocks(DOUBLE, "freqs_cis"), _blocks(SINGLE, "image_rotary_emb")),
        counts=block_counts,
        prologue=("x_embedder", "context_embedder"),
        epilogue=("norm_out", "proj_out"),
        text_first=False,
        residuals={"input": DOUBLE, "output": SINGLE},
        native=NATIVE_BLOCKS,
        native_patches=("attn1_patch", "attn1_output_patch"),
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=("y", "guidance", "attention_mask"),
        token_tensors=("context",),
        vector_tensors=("pooled", "guidance"),
        example=_example,
    ),
    forward=_Forward(
        arguments=_arguments,
        whole_latent=True,
        time_embed=TimeEmbed("time_text_embed"),
        cached_modules=per_call("time_text_embed"),
    ),
    tensor_plan={
        DOUBLE: DOUBLE_PLAN | dict.fromkeys(MODULATION, GATHER),
        SINGLE: SINGLE_PLAN | dict.fromkeys(SINGLE_MODULATION, GATHER),
    },
    patching=Patching(video=True),  # in bands of rows: each has every frame of the motion, and a single picture has some too
)
