"""HunyuanVideo (text to video; I2V v1 and SkyReels, with the picture in their channels): double blocks, then single ones.

Joint sequence [image, text]. The text's refiner takes the whole text: it runs on every rank of the first stage, for every
band anew. Key layouts: ComfyUI's, Tencent's, diffusers' HunyuanVideoTransformer3DModel.
"""

from typing import Any

import torch

from parallel_backend.families.base.blocks import BlockList, Blocks
from parallel_backend.families.base.family import CacheScope, Family, FileLayout, Forward, Inputs, Sizes, Source, TimeEmbed
from parallel_backend.families.base.patching import Patching
from parallel_backend.families.base.step_inputs import TEXT_MASK, Config, Shapes, StepInputs, image_tables
from parallel_backend.families.base.tensor_plan import GATHER
from parallel_backend.families.parts.conditioning import count_blocks, embedded_guidance, example, hidden, text_and_pooled
from parallel_backend.families.parts.flux_blocks import (
    DOUBLE,
    DOUBLE_PLAN,
    FEED_FORWARD,
    NORM_ALIASES,
    QKV,
    SINGLE,
    SINGLE_PLAN,
    block_counts,
    double_keys,
    rope_axes,
    single_keys,
)
from parallel_backend.families.parts.key_map import KeyMap

PATCH = [1, 2, 2]
REFINER = "txt_in.individual_token_refiner.blocks."
_OTHERS = dict.fromkeys(("cond_type_embedding.weight", "vision_in.proj.0.weight"), "HunyuanVideo 1.5")
"""A key -> the model that has it, which is another class in diffusers."""

_MODULATION = {"norm1.linear": "img_mod.lin", "norm1_context.linear": "txt_mod.lin"}
_SINGLE_MODULATION = {"norm.linear": "modulation.lin"}
_PER_CALL = (
    *("time_text_embed", "context_embedder", "norm_out.linear"),
    *(f"*.{name}" for name in (*_MODULATION, *_SINGLE_MODULATION)),
)
_EMBEDDERS = {  # diffusers module <- original module, two layers each
    "time_text_embed.timestep_embedder": "time_in",
    "time_text_embed.text_embedder": "vector_in",
    "context_embedder.time_text_embed.timestep_embedder": "txt_in.t_embedder",
    "context_embedder.time_text_embed.text_embedder": "txt_in.c_embedder",
}
_GUIDANCE = {"time_text_embed.guidance_embedder": "guidance_in"}
_OUTSIDE = {  # diffusers module <- original module
    "x_embedder.proj": "img_in.proj",
    "context_embedder.proj_in": "txt_in.input_embedder",
    "proj_out": "final_layer.linear",
}
_REFINER = {
    "norm1": "norm1",
    "norm2": "norm2",
    "norm_out.linear": "adaLN_modulation.1",
    "attn.to_out.0": "self_attn.proj",
    "ff.net.0.proj": "mlp.0",
    "ff.net.2": "mlp.2",
}
_TENCENT = {  # endings of module names: Tencent's -> ComfyUI's, as in its supported_models.py
    **{f"{name}.mlp.0": f"{name}.in_layer" for name in ("time_in", "guidance_in", "t_embedder")},
    **{f"{name}.mlp.2": f"{name}.out_layer" for name in ("time_in", "guidance_in", "t_embedder")},
    **{f"c_embedder.linear_{index}": f"c_embedder.{kind}_layer" for index, kind in ((1, "in"), (2, "out"))},
    "_attn_qkv": "_attn.qkv",
    "_attn_proj": "_attn.proj",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.2",
    "_mod.linear": "_mod.lin",
    ".modulation.linear": ".modulation.lin",
}
ALIASES = {
    **{f"{theirs}.{name}": f"{ours}.{name}" for theirs, ours in _TENCENT.items() for name in ("weight", "bias")},
    "_attn_q_norm.weight": "_attn.norm.query_norm.scale",
    "_attn_k_norm.weight": "_attn.norm.key_norm.scale",
    ".q_norm.weight": ".norm.query_norm.scale",
    ".k_norm.weight": ".norm.key_norm.scale",
    **NORM_ALIASES,
}


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


def _key_map(config: Config) -> dict[str, Source]:
    """ValueError for a model that diffusers' class computes otherwise than ComfyUI's."""
    if config.get("image_condition_type") == "token_replace":
        raise ValueError(
            "model_name: this folder's config.json says token_replace, which ComfyUI computes otherwise than diffusers. Use "
            "an I2V model that takes the picture in its channels (latent_concat), or a native loader."
        )
    keys = KeyMap()
    for ours, theirs in (_EMBEDDERS | (_GUIDANCE if config["guidance_embeds"] else {})).items():
        keys.copy({f"{ours}.linear_1": f"{theirs}.in_layer", f"{ours}.linear_2": f"{theirs}.out_layer"})
    keys.copy(_OUTSIDE)
    keys.copy({"norm_out.linear": "final_layer.adaLN_modulation.1"}, swap_halves=True)
    for index in range(config["num_refiner_layers"]):
        block = keys.inside(f"context_embedder.token_refiner.refiner_blocks.{index}.", f"{REFINER}{index}.")
        block.copy(_REFINER)
        block.split("self_attn.qkv", dict.fromkeys(QKV, hidden(config)))
    double_keys(keys, config, FEED_FORWARD | _MODULATION)
    single_keys(keys, config, _SINGLE_MODULATION)
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


HUNYUAN_VIDEO = Family(
    name="hunyuan-video",
    model_class="HunyuanVideoTransformer3DModel",
    native_classes=("HunyuanVideo", "HunyuanVideoI2V", "HunyuanVideoSkyreelsI2V"),
    file=FileLayout(
        detect=lambda shapes: f"{REFINER}0.norm1.weight" in shapes,
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
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=("y", "guidance", "attention_mask"),
        token_tensors=("context",),
        vector_tensors=("pooled", "guidance"),
        example=_example,
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        time_embed=TimeEmbed("time_text_embed"),
        drops_mask=True,
        cached_modules={"rope": CacheScope.PROMPT} | dict.fromkeys(_PER_CALL, CacheScope.CALL),
    ),
    tensor_plan={
        DOUBLE: DOUBLE_PLAN | dict.fromkeys(_MODULATION, GATHER),
        SINGLE: SINGLE_PLAN | dict.fromkeys(_SINGLE_MODULATION, GATHER),
    },
    patching=Patching(video=True),  # in bands of rows: each has every frame of the motion, and a single picture has some too
)
