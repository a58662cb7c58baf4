"""Stable Diffusion 3 and 3.5 large: joint blocks, joint sequence [image, text], positions from a table of its own.

Key layouts: Stability AI's MMDiT (which ComfyUI's files use) and diffusers' SD3Transformer2DModel.

The model's forward takes a picture, but a rank's tokens are any span of one, which need not be a rectangle. So they are
stood on top of each other, as a picture one patch wide, and `_prepare` sees to it that each gets its own position.
"""

import math
from typing import Any

import torch
from einops import rearrange
from torch import nn

from ..layout import Span
from ..tensor_parallel import COLUMN, COLUMN_BY_HEADS, GATHER, ROW, ROW_BY_HEADS
from .base import Family, Shapes, Source, StepInputs
from .shared import PATCH, count_blocks, example, grid, hidden, pack, text_and_pooled, unpack

HEAD = 64
"""Width of a head, in every model of this family; the weights show it only where there are query norms."""

_PLAIN = {  # diffusers module <- original module, parameters copied as they are
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "context_embedder": "context_embedder",
    "pos_embed.proj": "x_embedder.proj",
    "proj_out": "final_layer.linear",
}
_STREAMS = {  # original stream: diffusers' names of its modulation, projections, norms, output and feed-forward
    "x_block": ("norm1", ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), "to_out.0", "ff"),
    "context_block": (
        "norm1_context",
        ("add_q_proj", "add_k_proj", "add_v_proj"),
        ("norm_added_q", "norm_added_k"),
        "to_add_out",
        "ff_context",
    ),
}
_TENSOR_PLAN = {
    "transformer_blocks": {
        layer: style
        for modulation, projections, _, out, ff in _STREAMS.values()
        for layer, style in {
            f"{modulation}.linear": GATHER,
            **{f"attn.{name}": COLUMN_BY_HEADS for name in projections},
            f"attn.{out}": ROW_BY_HEADS,
            f"{ff}.net.0.proj": COLUMN,
            f"{ff}.net.2": ROW,
        }.items()
    }
}


def _detect(shapes: Shapes) -> bool:
    return all(
        key in shapes
        for key in ("joint_blocks.0.context_block.adaLN_modulation.1.weight", "x_embedder.proj.weight", "pos_embed")
    )


def _configure(shapes: Shapes) -> dict[str, Any]:
    width, channels, patch, _ = shapes["x_embedder.proj.weight"]
    norm = shapes.get("joint_blocks.0.x_block.attn.ln_q.weight")
    head = HEAD if norm is None else norm[0]
    layers = count_blocks(shapes, "joint_blocks.")
    return {
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // patch**2,
        "num_layers": layers,
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "caption_projection_dim": shapes["context_embedder.weight"][0],
        "pooled_projection_dim": shapes["y_embedder.mlp.0.weight"][1],
        "pos_embed_max_size": math.isqrt(shapes["pos_embed"][1]),
        "dual_attention_layers": tuple(i for i in range(layers) if f"joint_blocks.{i}.x_block.attn2.qkv.weight" in shapes),
        "qk_norm": None if norm is None else "rms_norm",
    }


def _recipe(config: dict[str, Any]) -> dict[str, Source]:
    if config["dual_attention_layers"]:
        raise ValueError(
            "model_name: this is Stable Diffusion 3.5 medium, whose second attention is not supported in this version. "
            "Stable Diffusion 3 medium and 3.5 large are."
        )
    width, out = hidden(config), {"pos_embed.pos_embed": Source("pos_embed")}

    def plain(target: str, source: str, rows: Span | None = None, swap: bool = False) -> None:
        for part in ("weight", "bias"):
            out[f"{target}.{part}"] = Source(f"{source}.{part}", rows, swap)

    for target, source in _PLAIN.items():
        plain(target, source)
    plain("norm_out.linear", "final_layer.adaLN_modulation.1", swap=True)
    for index in range(config["num_layers"]):
        for stream, (modulation, projections, norms, attention_out, ff) in _STREAMS.items():
            block, original = f"transformer_blocks.{index}.", f"joint_blocks.{index}.{stream}."
            # The last block's text only serves as keys: nothing follows its attention, and it has no gates.
            ends = stream == "context_block" and index == config["num_layers"] - 1
            plain(f"{block}{modulation}.linear", f"{original}adaLN_modulation.1", swap=ends)
            for place, name in enumerate(projections):
                plain(f"{block}attn.{name}", f"{original}attn.qkv", Span(place * width, (place + 1) * width))
            for name, source in zip(norms, ("ln_q", "ln_k"), strict=True):
                if config["qk_norm"] is not None:
                    out[f"{block}attn.{name}.weight"] = Source(f"{original}attn.{source}.weight")
            if not ends:
                plain(f"{block}attn.{attention_out}", f"{original}attn.proj")
                plain(f"{block}{ff}.net.0.proj", f"{original}mlp.fc1")
                plain(f"{block}{ff}.net.2", f"{original}mlp.fc2")
    return out


def _prepare(model: nn.Module, step: StepInputs) -> None:
    """Where `pos_embed` looks up the middle of its table, for a whole picture, it gets the rows of the rank's tokens."""
    if step.x is None:
        return
    embed, (rows, columns) = model.pos_embed, step.grid
    side = embed.pos_embed_max_size
    index = torch.arange(step.image.start, step.image.stop, device=step.x.device)
    row, column = (side - rows) // 2 + index // columns, (side - columns) // 2 + index % columns
    positions = embed.pos_embed[:, row * side + column]
    embed.cropped_pos_embed = lambda _height, _width: positions


def _arguments(step: StepInputs) -> dict[str, Any]:
    if step.x is None:  # only its height and width are read
        picture = step.timestep.new_empty(0, 0, PATCH * len(step.image), PATCH)
    else:
        picture = rearrange(step.x, "b n (c ph pw) -> b c (n ph) pw", ph=PATCH, pw=PATCH)
    return {
        "hidden_states": picture,
        "encoder_hidden_states": step.tensors.get("context"),
        "pooled_projections": step.tensors["pooled"],
        "timestep": step.timestep,
    }


def _conditioning(config: dict[str, Any], given: dict[str, Any]) -> dict[str, torch.Tensor]:
    return text_and_pooled("SD3", "TripleCLIPLoader, or a DualCLIPLoader of type sd3", config, given)


SD3 = Family(
    name="sd3",
    model_class="SD3Transformer2DModel",
    block_lists=("transformer_blocks",),
    prologue=("pos_embed", "context_embedder"),
    epilogue=("norm_out", "proj_out"),
    token_tensors=("context",),
    vector_tensors=("pooled",),
    time_embed=("time_text_embed", 1.0),
    latent_channels=lambda config: config["in_channels"],
    hidden=hidden,
    heads=lambda config: config["num_attention_heads"],
    head_size=lambda config: config["attention_head_dim"],
    blocks=lambda config: {"transformer_blocks": config["num_layers"]},
    tensor_plan=_TENSOR_PLAN,
    detect=_detect,
    configure=_configure,
    recipe=_recipe,
    arguments=_arguments,
    conditioning=_conditioning,
    example=example,
    grid=grid,
    pack=pack,
    unpack=unpack,
    patch_rows=PATCH,
    text_first=False,
    max_side=lambda config: config["pos_embed_max_size"],
    prepare=_prepare,
    output=lambda picture: rearrange(picture, "b c (n ph) pw -> b n (c ph pw)", ph=PATCH, pw=PATCH),
)
