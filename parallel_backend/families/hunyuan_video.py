"""HunyuanVideo (text to video; I2V v1 and SkyReels, with the picture in their channels): double blocks, then single ones.

Joint sequence [image, text]. The text's refiner takes the whole text: it runs on every rank of the first stage, for every
band anew. Key layouts: ComfyUI's, Tencent's, diffusers' HunyuanVideoTransformer3DModel.
"""

from typing import Any

import torch

from parallel_backend.families.base.family import BlockList, Family
from parallel_backend.families.base.patching import Patching
from parallel_backend.families.base.step_inputs import TEXT_MASK, Config, Rows, Shapes, StepInputs
from parallel_backend.families.parts.conditioning import count_blocks, example, text_and_pooled
from parallel_backend.families.parts.flux_blocks import DOUBLE, SINGLE, block_counts, rope_axes

from .hunyuan_keys import ALIASES, PLAN, REFINER, recipe

PATCH = [1, 2, 2]
_OTHERS = {"cond_type_embedding.weight": "HunyuanVideo 1.5", "vision_in.proj.0.weight": "HunyuanVideo 1.5"}


def _configure(shapes: Shapes) -> Config:
    other = next((name for key, name in _OTHERS.items() if key in shapes), None)
    if "vector_in.in_layer.weight" not in shapes:
        other = other or "HunyuanImage 2.1"
    width, channels, *patch = shapes["img_in.proj.weight"]
    if other is None and patch != PATCH:
        other = f"a HunyuanVideo with patches of {patch} instead of {PATCH}"
    if other is not None:
        raise ValueError(f"model_name: this is {other}, which this version cannot run. Use a HunyuanVideo T2V or I2V model.")
    (head,) = shapes["double_blocks.0.img_attn.norm.query_norm.scale"]
    return {
        "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // 4,
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "num_layers": count_blocks(shapes, "double_blocks."),
        "num_single_layers": count_blocks(shapes, "single_blocks."),
        "num_refiner_layers": count_blocks(shapes, REFINER),
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "text_embed_dim": shapes["txt_in.input_embedder.weight"][1],
        "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
        "rope_axes_dim": rope_axes(head),
    }


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


def _text(config: Config) -> Config:
    return {**config, "joint_attention_dim": config["text_embed_dim"]}


def _conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = text_and_pooled("HunyuanVideo", "DualCLIPLoader of type hunyuan_video", _text(config), given)
    mask = given.get("attention_mask")
    if mask is not None and not mask.bool().all():
        tensors[TEXT_MASK] = mask.bool()
    if config["guidance_embeds"]:
        if given.get("guidance") is None:
            raise ValueError("positive, negative: guidance is switched off, which this model's diffusers class cannot do.")
        tensors["guidance"] = given["guidance"]
    return tensors


def _example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    guidance = {"guidance": torch.full((1,), 6.0)} if config["guidance_embeds"] else {}
    return example(_text(config), text_tokens) | guidance


def _of_image(tables: tuple[torch.Tensor, ...], rows: Rows) -> tuple[torch.Tensor, ...]:
    return tuple(rows.of_image(table, 0) for table in tables)


def _blocks(name: str, rotary: str) -> BlockList:
    return BlockList(name, returns=("image", "text"), cuts={rotary: _of_image}, needs_text=True)


HUNYUAN_VIDEO = Family(
    name="hunyuan-video",
    model_class="HunyuanVideoTransformer3DModel",
    block_lists=(_blocks(DOUBLE, "freqs_cis"), _blocks(SINGLE, "image_rotary_emb")),
    prologue=("x_embedder", "context_embedder"),
    epilogue=("norm_out", "proj_out"),
    token_tensors=("context",),
    vector_tensors=("pooled", "guidance"),
    time_embed=("time_text_embed", 1.0),
    latent_channels=lambda config: config["in_channels"],
    blocks=block_counts,
    tensor_plan=PLAN,
    detect=lambda shapes: f"{REFINER}0.norm1.weight" in shapes,
    configure=_configure,
    recipe=recipe,
    arguments=_arguments,
    conditioning=_conditioning,
    example=_example,
    patching=Patching(video=True),  # in bands of rows: each has every frame of the motion, and a single picture has some too
    whole_latent=True,
    accepts=("y", "guidance", "attention_mask"),
    drops_mask=True,
    residuals={"input": DOUBLE, "output": SINGLE},
    text_first=False,
    key_aliases=ALIASES,
)
