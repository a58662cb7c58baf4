"""Flux.1 (dev, schnell, fill): double-stream blocks, then single-stream blocks; joint sequence [text, image].

Key layouts: black-forest-labs/flux (which ComfyUI's files use) and diffusers' FluxTransformer2DModel.
"""

from typing import Any

import torch

from ..tensor_parallel import COLUMN, COLUMN_BY_HEADS, GATHER, HEADS, ROW, ROW_BY_HEADS, WIDTH, Cut, Style
from .base import BlockList, Config, Family, Shapes, Source, StepInputs
from .keys import Keys
from .shared import count_blocks, example, grid_positions, hidden, text_and_pooled

MLP_RATIO = 4
DOUBLE, SINGLE = "transformer_blocks", "single_transformer_blocks"
QKV, ADDED_QKV = ("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
SCALE = {"weight": "scale"}

_OUTSIDE = {  # diffusers module <- original module
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "context_embedder": "txt_in",
    "x_embedder": "img_in",
    "proj_out": "final_layer.linear",
}
_GUIDANCE = {
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
}
DOUBLE_KEYS = {
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
}
DOUBLE_NORMS = {
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
}
SINGLE_NORMS = {"attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm"}
DOUBLE_PLAN = {
    **dict.fromkeys(QKV + ADDED_QKV, COLUMN_BY_HEADS),
    **dict.fromkeys(("attn.to_out.0", "attn.to_add_out"), ROW_BY_HEADS),
    **dict.fromkeys(("ff.net.0.proj", "ff_context.net.0.proj"), COLUMN),
    **dict.fromkeys(("ff.net.2", "ff_context.net.2"), ROW),
}
# A single block's proj_out takes attention and feed-forward side by side.
SINGLE_PLAN = {
    **dict.fromkeys(QKV, COLUMN_BY_HEADS),
    "proj_mlp": COLUMN,
    "proj_out": Style(Cut.ROW, (HEADS, WIDTH)),
}


def _detect(shapes: Shapes) -> bool:
    # Chroma, Flux.2 and others share Flux's block names: each lacks vector_in or the per-block modulation.
    needed = ("double_blocks.0.img_mod.lin.weight", "single_blocks.0.linear1.weight", "vector_in.in_layer.weight")
    return all(key in shapes for key in needed)


def rope_axes(head: int) -> tuple[int, int, int]:
    """Axes of the rotary embedding, which are nowhere in the weights.

    Every Flux.1 has (16, 56, 56) for its heads of 128; other head sizes (test models) get the same proportions in even
    numbers.
    """
    spatial = head * 7 // 16 // 2 * 2
    return head - 2 * spatial, spatial, spatial


def _configure(shapes: Shapes) -> Config:
    head = shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    return {
        "patch_size": 1,
        "in_channels": shapes["img_in.weight"][1],
        "out_channels": shapes["final_layer.linear.weight"][0],
        "num_layers": count_blocks(shapes, "double_blocks."),
        "num_single_layers": count_blocks(shapes, "single_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": shapes["img_in.weight"][0] // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "axes_dims_rope": rope_axes(head),
    }


def block_keys(keys: Keys, config: Config, modulated: bool) -> None:
    """The blocks that Chroma has too, which keeps no modulation in them."""
    width = hidden(config)
    for index in range(config["num_layers"]):
        block = keys.inside(f"{DOUBLE}.{index}.", f"double_blocks.{index}.")
        if modulated:
            block.copy({"norm1.linear": "img_mod.lin", "norm1_context.linear": "txt_mod.lin"})
        block.copy(DOUBLE_KEYS)
        block.copy(DOUBLE_NORMS, SCALE)
        block.split("img_attn.qkv", dict.fromkeys(QKV, width))
        block.split("txt_attn.qkv", dict.fromkeys(ADDED_QKV, width))
    for index in range(config["num_single_layers"]):
        block = keys.inside(f"{SINGLE}.{index}.", f"single_blocks.{index}.")
        block.copy({"proj_out": "linear2"} | ({"norm.linear": "modulation.lin"} if modulated else {}))
        block.copy(SINGLE_NORMS, SCALE)
        block.split("linear1", {**dict.fromkeys(QKV, width), "proj_mlp": MLP_RATIO * width})


def _recipe(config: Config) -> dict[str, Source]:
    keys = Keys()
    keys.copy(_OUTSIDE | (_GUIDANCE if config["guidance_embeds"] else {}))
    keys.copy({"norm_out.linear": "final_layer.adaLN_modulation.1"}, swap_halves=True)
    block_keys(keys, config, modulated=True)
    return keys.sources


def _arguments(step: StepInputs, _config: Config) -> dict[str, Any]:
    device = step.timestep.device
    return {
        "hidden_states": step.x,
        "encoder_hidden_states": step.tensors.get("context"),
        "pooled_projections": step.tensors["pooled"],
        "timestep": step.timestep,
        "guidance": step.tensors.get("guidance"),
        "img_ids": grid_positions(step.grid, step.image).to(device),
        "txt_ids": torch.zeros(len(step.text), 3, device=device),
    }


def _conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = text_and_pooled("Flux", "DualCLIPLoader of type flux (CLIP-L and T5)", config, given)
    if config["guidance_embeds"]:
        if given.get("guidance") is None:
            raise ValueError("positive, negative: guidance is switched off, which this model's diffusers class cannot do.")
        tensors["guidance"] = given["guidance"]
    return tensors


def _example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    guidance = {"guidance": torch.full((1,), 3.5)} if config["guidance_embeds"] else {}
    return example(config, text_tokens) | guidance


FLUX = Family(
    name="flux",
    model_class="FluxTransformer2DModel",
    block_lists=(BlockList(DOUBLE), BlockList(SINGLE)),
    prologue=("x_embedder", "context_embedder"),
    epilogue=("norm_out", "proj_out"),
    token_tensors=("context",),
    vector_tensors=("pooled", "guidance"),
    time_embed=("time_text_embed", 1000.0),
    latent_channels=lambda config: config["in_channels"] // 4,
    hidden=hidden,
    heads=lambda config: config["num_attention_heads"],
    head_size=lambda config: config["attention_head_dim"],
    blocks=lambda config: {DOUBLE: config["num_layers"], SINGLE: config["num_single_layers"]},
    tensor_plan={
        DOUBLE: DOUBLE_PLAN | {"norm1.linear": GATHER, "norm1_context.linear": GATHER},
        SINGLE: SINGLE_PLAN | {"norm.linear": GATHER},
    },
    detect=_detect,
    configure=_configure,
    recipe=_recipe,
    arguments=_arguments,
    conditioning=_conditioning,
    example=_example,
    key_aliases={"_norm.weight": "_norm.scale"},
)
