"""What Flux.1 and Flux.2 share: block names, key maps, tensor plans, sizes, arguments.

Key layouts: black-forest-labs/flux (which ComfyUI's
files use) and diffusers'.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..base.blocks import BlockList, Blocks
from ..base.family import CacheScope, cached
from ..base.segments import text_then_image
from ..base.step_inputs import Config, Shapes, StepInputs
from ..base.tensor_plan import COLUMN, COLUMN_BY_HEADS, GATHER, HEADS, ROW, ROW_BY_HEADS, WIDTH, CutKind, LayerCut, LayerCuts
from .conditioning import count_blocks, hidden
from .key_map import BOTH, KeyMap, Parameters

DOUBLE, SINGLE = "transformer_blocks", "single_transformer_blocks"
NATIVE_BLOCKS = {"double_block": DOUBLE, "single_block": SINGLE}
QKV, ADDED_QKV = ("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
SCALE = {"weight": "scale"}
"""A norm's parameter: diffusers' name -> original name. Files that ComfyUI saved have diffusers' name: NORM_ALIASES."""
NORM_ALIASES = {"_norm.weight": "_norm.scale"}

OUTSIDE = {"context_embedder": "txt_in", "x_embedder": "img_in", "proj_out": "final_layer.linear"}
"""Modules around the blocks that every class has: diffusers' name -> original name."""
PROJECTIONS = {"attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj"}
FEED_FORWARD = {
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
DOUBLE_NORMS = {
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
}
DOUBLE_MODULATION = {"norm1.linear": "img_mod.lin", "norm1_context.linear": "txt_mod.lin"}
SINGLE_MODULATION = {"norm.linear": "modulation.lin"}
SINGLE_NORMS = {"attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm"}

ATTENTION_PLAN = {
    **dict.fromkeys(QKV + ADDED_QKV, COLUMN_BY_HEADS),
    **dict.fromkeys(PROJECTIONS, ROW_BY_HEADS),
}
DOUBLE_PLAN = {
    **ATTENTION_PLAN,
    **dict.fromkeys(("ff.net.0.proj", "ff_context.net.0.proj"), COLUMN),
    **dict.fromkeys(("ff.net.2", "ff_context.net.2"), ROW),
}
BOTH_ROWS = LayerCut(CutKind.ROW, (HEADS, WIDTH))
"""Cut of a single block's last layer, whose input is attention and feed-forward side by side."""
SINGLE_PLAN = {**dict.fromkeys(QKV, COLUMN_BY_HEADS), "proj_mlp": COLUMN, "proj_out": BOTH_ROWS}
MODULATED_PLAN: LayerCuts = {
    DOUBLE: DOUBLE_PLAN | dict.fromkeys(DOUBLE_MODULATION, GATHER),
    SINGLE: SINGLE_PLAN | dict.fromkeys(SINGLE_MODULATION, GATHER),
}
"""Tensor plan of a class whose blocks have modulation layers."""


def block_counts(config: Config) -> dict[str, int]:
    return {DOUBLE: config["num_layers"], SINGLE: config["num_single_layers"]}


BLOCKS = Blocks(
    lists=(BlockList(DOUBLE), BlockList(SINGLE)),
    counts=block_counts,
    prologue=("x_embedder", "context_embedder"),
    epilogue=("norm_out", "proj_out"),
    native=NATIVE_BLOCKS,
    native_patches=("attn1_patch", "attn1_output_patch", "post_input"),
    segments=text_then_image,
)
"""Blocks of Flux.1 without ControlNet. Rows replace the fields in which their class differs."""


def cached_modules(time_embed: str) -> dict[str, CacheScope]:
    """`Forward.cached_modules` of a class whose blocks have modulation layers. `time_embed`: its embedding of the time."""
    modulation = [f"*.{layer}" for layer in DOUBLE_MODULATION | SINGLE_MODULATION]
    return cached(call=(time_embed, *modulation, "norm_out.linear"), band=("pos_embed",))


def sizes(shapes: Shapes) -> Config:
    """Constructor arguments that all classes have."""
    norm = "double_blocks.0.img_attn.norm.query_norm."
    (head,) = shapes[f"{norm}scale" if f"{norm}scale" in shapes else f"{norm}weight"]
    width, channels = shapes["img_in.weight"]
    return {
        "patch_size": 1,
        "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0],
        "num_layers": count_blocks(shapes, "double_blocks."),
        "num_single_layers": count_blocks(shapes, "single_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
    }


def rope_axes(head: int) -> tuple[int, int, int]:
    """Channels of a head for each axis of the rotary embedding. The weights do not show them.

    Every Flux.1 has (16, 56, 56) in heads of 128. Other heads (test models) get these proportions, all even.
    """
    spatial = head * 7 // 16 // 2 * 2
    return head - 2 * spatial, spatial, spatial


def embedder_keys(keys: KeyMap, embedders: Mapping[str, str], parameters: Parameters = BOTH) -> None:
    """Adds embedders of two layers each: diffusers' name -> original name."""
    for target, source in embedders.items():
        keys.copy({f"{target}.linear_1": f"{source}.in_layer", f"{target}.linear_2": f"{source}.out_layer"}, parameters)


def outside_keys(keys: KeyMap, embedders: Mapping[str, str], parameters: Parameters = BOTH) -> None:
    """Adds the modules around the blocks. `embedders`: see `embedder_keys`."""
    embedder_keys(keys, embedders, parameters)
    keys.copy(OUTSIDE, parameters)
    keys.copy({"norm_out.linear": "final_layer.adaLN_modulation.1"}, parameters, swap_halves=True)


def double_keys(
    keys: KeyMap, config: Config, layers: Mapping[str, str], parameters: Parameters = BOTH, norms: Parameters = SCALE
) -> None:
    """Adds the double blocks. Attention is the same in all classes, `layers` are the others (diffusers' name -> original).

    `parameters`: those of the layers. `norms`: those of the norms of queries and keys.
    """
    for block in keys.each(DOUBLE, "double_blocks", config["num_layers"]):
        block.copy({**PROJECTIONS, **layers}, parameters)
        block.copy(DOUBLE_NORMS, norms)
        block.split("img_attn.qkv", dict.fromkeys(QKV, hidden(config)), parameters)
        block.split("txt_attn.qkv", dict.fromkeys(ADDED_QKV, hidden(config)), parameters)


def single_keys(
    keys: KeyMap, config: Config, layers: Mapping[str, str], feed_forward: int = 4, norms: Parameters = SCALE
) -> None:
    """Adds single blocks with biases. `layers`: further layers of the block (diffusers' name -> original).

    `feed_forward`: rows of the feed-forward's first layer, as multiples of the width. `norms`: see `double_keys`.
    """
    width = hidden(config)
    for block in keys.each(SINGLE, "single_blocks", config["num_single_layers"]):
        block.copy({"proj_out": "linear2", **layers})
        block.copy(SINGLE_NORMS, norms)
        block.split("linear1", {**dict.fromkeys(QKV, width), "proj_mlp": feed_forward * width})


def token_arguments(step: StepInputs) -> dict[str, Any]:
    """Arguments of every class. The text is at position 0 on every axis, which some families replace."""
    return {
        "hidden_states": step.x,
        "encoder_hidden_states": step.tensors.get("context"),
        "timestep": step.timestep,
        "img_ids": step.positions(),
        "txt_ids": torch.zeros(len(step.text), 3, device=step.timestep.device),
    }


def diagonal(step: StepInputs) -> torch.Tensor:
    """[t, 3] `txt_ids` of the rank's text: word i at row i and column i."""
    words = step.text_numbers
    return torch.stack((words * 0, words, words), dim=1)
