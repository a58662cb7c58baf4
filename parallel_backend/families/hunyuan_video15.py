"""HunyuanVideo 1.5: text and picture to video, and its super resolution. Double blocks only; the latent, a picture and its
mask are in the channels, for super resolution also the video that is to be made sharper.

Joint sequence [image, text]. The text is CLIP's tokens of the picture and ByT5's of quoted words, if there are any, and the
prompt, whose refiner takes the whole prompt. Key layouts: ComfyUI's, Tencent's, and diffusers'
HunyuanVideo15Transformer3DModel. The forward is models/hunyuan.py.
"""

from dataclasses import replace
from typing import Any

import torch

from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed
from .base.file_layout import FileLayout, Source
from .base.patching import Patching
from .base.segments import text_then_image
from .base.step_inputs import Config, Shapes, StepInputs
from .parts import flux_blocks, hunyuan
from .parts.epsilons import UNNAMED
from .parts.key_map import WEIGHT, KeyMap

NAME = "HunyuanVideo 1.5"
_PICTURE = {"norm_in": "proj.0", "linear_1": "proj.1", "linear_2": "proj.3", "norm_out": "proj.4"}


def _configure(shapes: Shapes) -> Config:
    if (patch := list(shapes["img_in.proj.weight"][2:])) != [1, 1, 1]:
        raise ValueError(f"model_name: this is a {NAME} with patches of {patch}, which this version cannot run.")
    config = hunyuan.sizes(shapes)
    return config | {
        "out_channels": shapes["final_layer.linear.weight"][0],
        "text_embed_2_dim": shapes["byt5_in.layernorm.weight"][0],
        "image_embed_dim": shapes["vision_in.proj.0.weight"][0],
        "rope_axes_dim": flux_blocks.rope_axes(config["attention_head_dim"]),
        "use_meanflow": hunyuan.mean_flow(shapes),
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys, next_time = KeyMap(), {"time_embed.timestep_embedder_r": "time_r_in"} if config.get("use_meanflow") else {}
    hunyuan.outside_keys(keys, config, {"time_embed.timestep_embedder": "time_in"} | next_time)
    hunyuan.glyph_keys(keys)
    keys.inside("image_embedder.", "vision_in.").copy(_PICTURE)
    keys.copy({"cond_type_embed": "cond_type_embedding"}, WEIGHT)
    flux_blocks.double_keys(keys, config, flux_blocks.FEED_FORWARD | flux_blocks.DOUBLE_MODULATION)
    return keys.sources


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As `unmasked_text`, and CLIP's `picture` [B, P, image_embed_dim] if the call has one."""
    tensors, picture = hunyuan.unmasked_text(NAME, config, call), call.get("clip_fea")
    if picture is None:
        return tensors
    if picture.shape[-1] != config["image_embed_dim"]:
        raise ValueError(
            f"positive, negative: the CLIP vision output has width {picture.shape[-1]}, this model needs "
            f"{config['image_embed_dim']}. Use the SigLIP vision model made for {NAME}."
        )
    return tensors | {"picture": picture}


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    return hunyuan.unmasked_arguments(step, config) | {"image_embeds": step.tensors.get("picture")}


HUNYUAN_VIDEO_15 = Family(
    name="hunyuan-video-1.5",
    model_class="HunyuanVideo15Transformer3DModel",
    class_module="parallel_backend.families.models.hunyuan",
    native_classes=("HunyuanVideo15", "HunyuanVideo15_SR_Distilled"),
    file=FileLayout(
        detect=lambda shapes: hunyuan.has_refiner(shapes) and hunyuan.is_video_15(shapes),
        configure=_configure,
        key_map=_key_map,
        aliases=hunyuan.ALIASES,
    ),
    blocks=replace(
        hunyuan.BLOCKS,
        lists=(hunyuan.block_list(flux_blocks.DOUBLE, "freqs_cis"),),
        counts=lambda config: {flux_blocks.DOUBLE: config["num_layers"]},
        prologue=("x_embedder", "context_embedder", "context_embedder_2", "image_embedder"),
        residuals={"input": flux_blocks.DOUBLE},
        native={"double_block": flux_blocks.DOUBLE},
        segments=text_then_image,
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=Inputs(
        conditioning=_conditioning,
        # It embeds neither pooled text nor guidance.
        accepts=("y", "guidance", "attention_mask", "txt_byt5", "clip_fea", "disable_time_r"),
        options=hunyuan.TIME_OPTIONS,
        token_tensors=("context", "glyphs", "picture"),
        vector_tensors=(hunyuan.NEXT_TIME,),
        exact=(hunyuan.NEXT_TIME,),
        example=lambda config, tokens: {"context": torch.randn(1, tokens, config["text_embed_dim"])},
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        time_embed=TimeEmbed("time_embed"),
        cached_modules=hunyuan.cached_modules("time_embed"),
    ),
    half_dtypes=lambda _config: ("fp16", "bf16"),
    tensor_plan={flux_blocks.DOUBLE: flux_blocks.MODULATED_PLAN[flux_blocks.DOUBLE]},
    patching=Patching(side=1, video=True),
    epsilons=UNNAMED,
)
