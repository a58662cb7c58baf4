"""HunyuanImage 2.1: double blocks, then single ones, on latents of 1/32 of the picture's sides; and its refiner.

The refiner takes a picture for a video of one frame, which has the picture that is to be made sharper in its channels.

Joint sequence [image, text]. The text is ByT5's tokens of quoted words, if there are any, and the prompt, whose refiner
takes the whole prompt. Key layouts: ComfyUI's, Tencent's, and diffusers' HunyuanImageTransformer2DModel. The forward is
models/hunyuan.py.
"""

from dataclasses import replace
from typing import Any

import torch

from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed
from .base.file_layout import FileLayout, FolderLayout, Source
from .base.patching import Patching
from .base.step_inputs import GUIDANCE, Config, Shapes, StepInputs
from .parts import flux_blocks, hunyuan
from .parts.conditioning import count_blocks, embedded_guidance
from .parts.epsilons import UNNAMED
from .parts.key_map import KeyMap

NAME = "HunyuanImage 2.1"


def _configure(shapes: Shapes) -> Config:
    patch = tuple(shapes["img_in.proj.weight"][2:])
    if set(patch) != {1}:
        raise ValueError(f"model_name: this is a {NAME} with patches of {list(patch)}, which this version cannot run.")
    config = hunyuan.sizes(shapes)
    head = config["attention_head_dim"]
    return config | {
        "out_channels": shapes["final_layer.linear.weight"][0],
        "num_single_layers": count_blocks(shapes, "single_blocks."),
        "text_embed_2_dim": shapes.get("byt5_in.layernorm.weight", (None,))[0],
        "patch_size": patch,
        "rope_axes_dim": (head // 2,) * 2 if len(patch) == 2 else flux_blocks.rope_axes(head),
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "use_meanflow": hunyuan.mean_flow(shapes),
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    embedders = {"timestep_embedder": "time_in"}
    embedders |= {"timestep_embedder_r": "time_r_in"} if config.get("use_meanflow") else {}
    embedders |= {"guidance_embedder": "guidance_in"} if config["guidance_embeds"] else {}
    hunyuan.outside_keys(keys, config, {f"time_guidance_embed.{ours}": theirs for ours, theirs in embedders.items()})
    if config["text_embed_2_dim"] is not None:
        hunyuan.glyph_keys(keys)
    flux_blocks.double_keys(keys, config, flux_blocks.FEED_FORWARD | flux_blocks.DOUBLE_MODULATION)
    flux_blocks.single_keys(keys, config, flux_blocks.SINGLE_MODULATION)
    return keys.sources


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    if config["text_embed_2_dim"] is None:
        call = {name: value for name, value in call.items() if name != "txt_byt5"}  # as the native model does
    tensors = hunyuan.unmasked_text(NAME, config, call)
    return tensors | embedded_guidance(config, call)


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    return hunyuan.unmasked_arguments(step, config) | {"guidance": step.tensors.get(GUIDANCE)}


def _file(sides: int) -> FileLayout:
    """Files and folders of the model whose latents have so many axes: 2, or 3 for the refiner."""
    return FileLayout(
        detect=lambda shapes: hunyuan.is_image(shapes, sides),
        configure=_configure,
        key_map=_key_map,
        aliases=hunyuan.ALIASES,
        folder=FolderLayout(takes=lambda config: len(config.get("patch_size", (1, 1))) == sides),
    )


HUNYUAN_IMAGE = Family(
    name="hunyuan-image-2.1",
    model_class="HunyuanImageTransformer2DModel",
    class_module="parallel_backend.families.models.hunyuan",
    native_classes=("HunyuanImage21",),
    file=_file(sides=2),
    blocks=replace(hunyuan.BLOCKS, prologue=("x_embedder", "context_embedder", "context_embedder_2")),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=("guidance", "attention_mask", "txt_byt5", "disable_time_r"),
        options=hunyuan.TIME_OPTIONS,
        token_tensors=("context", "glyphs"),
        vector_tensors=(GUIDANCE, hunyuan.NEXT_TIME),
        exact=(hunyuan.NEXT_TIME,),
        example=lambda config, tokens: (
            {"context": torch.randn(1, tokens, config["text_embed_dim"])}
            | ({GUIDANCE: torch.full((1,), 6.0)} if config["guidance_embeds"] else {})
        ),
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        time_embed=TimeEmbed("time_guidance_embed"),
        cached_modules=hunyuan.cached_modules("time_guidance_embed"),
    ),
    tensor_plan=flux_blocks.MODULATED_PLAN,
    patching=Patching(side=1),
    epsilons=UNNAMED,
)

HUNYUAN_IMAGE_REFINER = replace(
    HUNYUAN_IMAGE,
    name="hunyuan-image-2.1-refiner",
    native_classes=("HunyuanImage21Refiner",),
    file=_file(sides=3),
    inputs=replace(HUNYUAN_IMAGE.inputs, options=()),  # ComfyUI leaves mean flow out
    patching=Patching(side=1, video=True),
)
