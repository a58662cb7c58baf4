"""HunyuanVideo (text to video; I2V v1 and SkyReels, with the picture in their channels): double blocks, then single ones.

Joint sequence [image, text]. The text's refiner takes the whole text, so it runs on every rank of the first stage. Key
layouts: ComfyUI's, Tencent's, diffusers' HunyuanVideoTransformer3DModel.
"""

from dataclasses import replace
from typing import Any

import torch

from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed
from .base.file_layout import FileLayout, Source
from .base.patching import Patching
from .base.segments import text_then_image
from .base.step_inputs import TEXT_MASK, Config, Shapes, StepInputs
from .parts import flux_blocks, hunyuan
from .parts.conditioning import count_blocks, embedded_guidance, example, text_and_pooled
from .parts.epsilons import UNNAMED
from .parts.key_map import KeyMap

PATCH = [1, 2, 2]
_EMBEDDERS = {  # diffusers module <- original module, two layers each
    "time_text_embed.timestep_embedder": "time_in",
    "time_text_embed.text_embedder": "vector_in",
}
_GUIDANCE = {"time_text_embed.guidance_embedder": "guidance_in"}


def _configure(shapes: Shapes) -> Config:
    if (patch := list(shapes["img_in.proj.weight"][2:])) != PATCH:
        raise ValueError(
            f"model_name: this is a HunyuanVideo with patches of {patch} instead of {PATCH}, which this version cannot run. "
            "Use a HunyuanVideo T2V or I2V model."
        )
    config = hunyuan.sizes(shapes)
    return config | {
        "out_channels": shapes["final_layer.linear.weight"][0] // 4,
        "num_single_layers": count_blocks(shapes, "single_blocks."),
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
        "rope_axes_dim": flux_blocks.rope_axes(config["attention_head_dim"]),
    }


def _key_map(config: Config) -> dict[str, Source]:
    """ValueError for a model that diffusers' class and ComfyUI's compute differently."""
    if config.get("image_condition_type") == "token_replace":
        raise ValueError(
            "model_name: this folder's config.json says token_replace, which ComfyUI computes otherwise than diffusers. Use "
            "an I2V model that takes the picture in its channels (latent_concat), or a native loader."
        )
    keys = KeyMap()
    hunyuan.outside_keys(keys, config, _EMBEDDERS | (_GUIDANCE if config["guidance_embeds"] else {}))
    flux_blocks.double_keys(keys, config, flux_blocks.FEED_FORWARD | flux_blocks.DOUBLE_MODULATION)
    flux_blocks.single_keys(keys, config, flux_blocks.SINGLE_MODULATION)
    return keys.sources


def _widths(config: Config) -> tuple[int, int]:
    return config["text_embed_dim"], config["pooled_projection_dim"]


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = text_and_pooled("HunyuanVideo", "DualCLIPLoader of type hunyuan_video", _widths(config), call)
    mask = call.get("attention_mask")
    if mask is not None and not mask.bool().all():
        tensors[TEXT_MASK] = mask.bool()
    return tensors | embedded_guidance(config, call)


def _example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    guidance = {"guidance": torch.full((1,), 6.0)} if config["guidance_embeds"] else {}
    return example(_widths(config), text_tokens) | guidance


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


class _Forward(Forward):
    drops_mask = True


HUNYUAN_VIDEO = Family(
    name="hunyuan-video",
    model_class="HunyuanVideoTransformer3DModel",
    native_classes=("HunyuanVideo", "HunyuanVideoI2V", "HunyuanVideoSkyreelsI2V"),
    file=FileLayout(
        detect=lambda shapes: (
            hunyuan.has_refiner(shapes) and "vector_in.in_layer.weight" in shapes and not hunyuan.is_video_15(shapes)
        ),
        configure=_configure,
        key_map=_key_map,
        aliases=hunyuan.ALIASES,
    ),
    blocks=replace(
        hunyuan.BLOCKS,
        lists=(hunyuan.block_list(flux_blocks.DOUBLE, "freqs_cis"), hunyuan.block_list(flux_blocks.SINGLE)),
        segments=text_then_image,
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
        cached_modules=hunyuan.cached_modules("time_text_embed"),
    ),
    tensor_plan=flux_blocks.MODULATED_PLAN,
    # Bands of rows: each band has every frame of the motion, and a single picture can be cut too.
    patching=Patching(video=True),
    epsilons=UNNAMED,
)
