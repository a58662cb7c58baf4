"""Flux.1 (dev, schnell): double-stream blocks, then single-stream blocks; joint sequence [text, image].

Key layouts: black-forest-labs/flux (which ComfyUI's files use) and diffusers' FluxTransformer2DModel.
"""

from typing import Any

import torch

from ..layout import Span
from ..tensor_parallel import COLUMN, COLUMN_BY_HEADS, GATHER, HEADS, ROW, ROW_BY_HEADS, WIDTH, Cut, Style
from .base import Family, Shapes, Source, StepInputs
from .shared import PATCH, count_blocks, example, grid, hidden, pack, text_and_pooled, unpack

MLP_RATIO = 4

_PLAIN = {  # diffusers module <- original module, parameters copied as they are
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
_DOUBLE = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
}
_DOUBLE_NORMS = {
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
}
_SINGLE = {"norm.linear": "modulation.lin", "proj_out": "linear2"}
_TENSOR_PLAN = {
    "transformer_blocks": {
        "norm1.linear": GATHER,
        "norm1_context.linear": GATHER,
        **dict.fromkeys(("attn.to_q", "attn.to_k", "attn.to_v"), COLUMN_BY_HEADS),
        **dict.fromkeys(("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), COLUMN_BY_HEADS),
        "attn.to_out.0": ROW_BY_HEADS,
        "attn.to_add_out": ROW_BY_HEADS,
        "ff.net.0.proj": COLUMN,
        "ff.net.2": ROW,
        "ff_context.net.0.proj": COLUMN,
        "ff_context.net.2": ROW,
    },
    "single_transformer_blocks": {
        "norm.linear": GATHER,
        **dict.fromkeys(("attn.to_q", "attn.to_k", "attn.to_v"), COLUMN_BY_HEADS),
        "proj_mlp": COLUMN,
        "proj_out": Style(Cut.ROW, (HEADS, WIDTH)),  # its input is attention and feed-forward side by side
    },
}
_SINGLE_NORMS = {"attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm"}


def _detect(shapes: Shapes) -> bool:
    # Chroma, Flux.2 and others share Flux's block names: each lacks vector_in or the per-block modulation.
    return all(
        key in shapes
        for key in ("double_blocks.0.img_mod.lin.weight", "single_blocks.0.linear1.weight", "vector_in.in_layer.weight")
    )


def _configure(shapes: Shapes) -> dict[str, Any]:
    width = shapes["img_in.weight"][0]
    head = shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    # The axes of the rotary embedding are nowhere in the weights: every Flux.1 has (16, 56, 56) for its heads of 128, and
    # other head sizes (test models) get the same proportions in even numbers.
    spatial = head * 7 // 16 // 2 * 2
    return {
        "patch_size": 1,
        "in_channels": shapes["img_in.weight"][1],
        "out_channels": shapes["final_layer.linear.weight"][0],
        "num_layers": count_blocks(shapes, "double_blocks."),
        "num_single_layers": count_blocks(shapes, "single_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "axes_dims_rope": (head - 2 * spatial, spatial, spatial),
    }


def _recipe(config: dict[str, Any]) -> dict[str, Source]:
    width, out = hidden(config), {}

    def plain(target: str, source: str, span: Span | None = None, swap: bool = False) -> None:
        for part in ("weight", "bias"):
            out[f"{target}.{part}"] = Source(f"{source}.{part}", span, swap)

    def packed(prefix: str, source: str, targets: dict[str, int]) -> None:
        start = 0
        for target, rows in targets.items():
            plain(prefix + target, source, Span(start, start + rows))
            start += rows

    for target, source in (_PLAIN | (_GUIDANCE if config["guidance_embeds"] else {})).items():
        plain(target, source)
    plain("norm_out.linear", "final_layer.adaLN_modulation.1", swap=True)
    for index in range(config["num_layers"]):
        block, original = f"transformer_blocks.{index}.", f"double_blocks.{index}."
        for target, source in _DOUBLE.items():
            plain(block + target, original + source)
        for target, source in _DOUBLE_NORMS.items():
            out[f"{block}{target}.weight"] = Source(f"{original}{source}.scale")
        packed(block + "attn.", original + "img_attn.qkv", dict.fromkeys(("to_q", "to_k", "to_v"), width))
        packed(
            block + "attn.",
            original + "txt_attn.qkv",
            dict.fromkeys(("add_q_proj", "add_k_proj", "add_v_proj"), width),
        )
    for index in range(config["num_single_layers"]):
        block, original = f"single_transformer_blocks.{index}.", f"single_blocks.{index}."
        for target, source in _SINGLE.items():
            plain(block + target, original + source)
        for target, source in _SINGLE_NORMS.items():
            out[f"{block}{target}.weight"] = Source(f"{original}{source}.scale")
        rows = {"attn.to_q": width, "attn.to_k": width, "attn.to_v": width, "proj_mlp": MLP_RATIO * width}
        packed(block, original + "linear1", rows)
    return out


def _positions(grid: tuple[int, ...], span: Span) -> torch.Tensor:
    """[n, 3]: (0, row, column) of image tokens `span`, counted row by row."""
    index = torch.arange(span.start, span.stop)
    return torch.stack((torch.zeros_like(index), index // grid[1], index % grid[1]), dim=1).float()


def _arguments(step: StepInputs) -> dict[str, Any]:
    device = step.timestep.device
    guidance = step.tensors.get("guidance")
    return {
        "hidden_states": step.x,
        "encoder_hidden_states": step.tensors.get("context"),
        "pooled_projections": step.tensors["pooled"],
        "timestep": step.timestep,
        "guidance": guidance,
        "img_ids": _positions(step.grid, step.image).to(device),
        "txt_ids": torch.zeros(len(step.text), 3, device=device),
    }


def _conditioning(config: dict[str, Any], given: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = text_and_pooled("Flux", "DualCLIPLoader of type flux (CLIP-L and T5)", config, given)
    if config["guidance_embeds"]:
        if given.get("guidance") is None:
            raise ValueError("positive, negative: guidance is switched off, which this model's diffusers class cannot do.")
        tensors["guidance"] = given["guidance"]
    return tensors


def _example(config: dict[str, Any], text_tokens: int) -> dict[str, torch.Tensor]:
    guidance = {"guidance": torch.full((1,), 3.5)} if config["guidance_embeds"] else {}
    return example(config, text_tokens) | guidance


FLUX = Family(
    name="flux",
    model_class="FluxTransformer2DModel",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    prologue=("x_embedder", "context_embedder"),
    epilogue=("norm_out", "proj_out"),
    token_tensors=("context",),
    vector_tensors=("pooled", "guidance"),
    time_embed=("time_text_embed", 1000.0),
    latent_channels=lambda config: config["in_channels"] // PATCH**2,
    hidden=hidden,
    heads=lambda config: config["num_attention_heads"],
    head_size=lambda config: config["attention_head_dim"],
    blocks=lambda config: {
        "transformer_blocks": config["num_layers"],
        "single_transformer_blocks": config["num_single_layers"],
    },
    tensor_plan=_TENSOR_PLAN,
    detect=_detect,
    configure=_configure,
    recipe=_recipe,
    arguments=_arguments,
    conditioning=_conditioning,
    example=_example,
    grid=grid,
    pack=pack,
    unpack=unpack,
    patch_rows=PATCH,
    key_aliases={"_norm.weight": "_norm.scale"},
)
