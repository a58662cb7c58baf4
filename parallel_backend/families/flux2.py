"""Flux.2 (dev, klein): Flux.1's two kinds of blocks with one modulation for all of a kind, joint sequence [text, image].

Tokens are single latent pixels. Layers have no biases, feed-forwards are SwiGLU, and a single block's attention and
feed-forward are one layer in and one layer out. Key layouts: black-forest-labs/flux2 (which ComfyUI's files use) and
diffusers' Flux2Transformer2DModel.
"""

from typing import Any

import torch
import torch.nn.functional as F

from .base.blocks import BlockList, Blocks
from .base.family import CacheScope, Family, FileLayout, Forward, Inputs, Sizes, Source, TimeEmbed
from .base.patching import Patching
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import HEADS, ROW, WIDTH, CutKind, LayerCut
from .parts.conditioning import text
from .parts.flux_blocks import (
    ATTENTION_PLAN,
    BOTH_ROWS,
    DOUBLE,
    NATIVE_BLOCKS,
    NATIVE_PATCHES,
    NORM_ALIASES,
    SCALE,
    SINGLE,
    SINGLE_NORMS,
    block_counts,
    double_keys,
    sizes,
    token_arguments,
)
from .parts.key_map import KeyMap
from .parts.references import ACCEPTS, reference_tensors
from .parts.rope import OPTION, rope_tensors, scale_and_shift

PATCHING = Patching(side=1)
_WEIGHT = ("weight",)
_TIME, _GUIDANCE = "time_guidance_embed.timestep_embedder", "time_guidance_embed.guidance_embedder"
_MODULATION = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
_NEEDED = ("double_stream_modulation_img.lin.weight", "single_blocks.0.linear1.weight")
_FEED_FORWARD = {
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
_GATED = LayerCut(CutKind.COLUMN, (WIDTH, WIDTH))  # SwiGLU: gate and value
_QKV_GATED = LayerCut(CutKind.COLUMN, (HEADS, HEADS, HEADS, WIDTH, WIDTH))
_PLAN = {
    DOUBLE: ATTENTION_PLAN
    | dict.fromkeys(("ff.linear_in", "ff_context.linear_in"), _GATED)
    | dict.fromkeys(("ff.linear_out", "ff_context.linear_out"), ROW),
    SINGLE: {"attn.to_qkv_mlp_proj": _QKV_GATED, "attn.to_out": BOTH_ROWS},
}


def _configure(shapes: Shapes) -> Config:
    config = sizes(shapes)
    head, width = config["attention_head_dim"], shapes["img_in.weight"][0]
    return config | {
        "timestep_guidance_channels": shapes["time_in.in_layer.weight"][1],
        "mlp_ratio": shapes["double_blocks.0.img_mlp.2.weight"][1] / width,
        # Nowhere in the weights: every Flux.2 has (32, 32, 32, 32) for its heads of 128, and theta 2000.
        "axes_dims_rope": (head // 4,) * 4,
        "rope_theta": 2000,
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    outside = {"context_embedder": "txt_in", "x_embedder": "img_in", "proj_out": "final_layer.linear"}
    embedders = {_TIME: "time_in"} | ({_GUIDANCE: "guidance_in"} if config["guidance_embeds"] else {})
    for ours, theirs in embedders.items():
        outside |= {f"{ours}.linear_1": f"{theirs}.in_layer", f"{ours}.linear_2": f"{theirs}.out_layer"}
    keys.copy(outside | {f"{name}.linear": f"{name}.lin" for name in _MODULATION}, _WEIGHT)
    keys.copy({"norm_out.linear": "final_layer.adaLN_modulation.1"}, _WEIGHT, swap_halves=True)
    double_keys(keys, config, _FEED_FORWARD, _WEIGHT)
    for index in range(config["num_single_layers"]):
        block = keys.inside(f"{SINGLE}.{index}.", f"single_blocks.{index}.")
        block.copy({"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}, _WEIGHT)
        block.copy(SINGLE_NORMS, SCALE)
    return keys.sources


def _arguments(step: StepInputs, _config: Config) -> dict[str, Any]:
    own = torch.arange(step.text.start, step.text.stop, dtype=torch.float32, device=step.timestep.device)
    text_ids = F.pad(own[:, None], (3, 0))
    given = token_arguments(step) | {"img_ids": F.pad(step.positions(), (0, 1)), "txt_ids": text_ids}
    # This forward looks at its inputs' dtype and at the text's length before it embeds them.
    empty = step.timestep.new_zeros(len(step.timestep), len(step.text), 1, dtype=step.dtype)
    replaced = {name: empty for name in ("hidden_states", "encoder_hidden_states") if given[name] is None}
    return given | replaced | {"guidance": step.tensors.get("guidance")}


def _conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {"context": text("Flux.2", config["joint_attention_dim"], given)}
    scale, shift = scale_and_shift(given)
    tensors |= reference_tensors(PATCHING, given, method="index", step=10.0, scale=scale, shift=shift) | rope_tensors(given)
    if config["guidance_embeds"] and given.get("guidance") is not None:
        tensors["guidance"] = given["guidance"]
    return tensors


FLUX2 = Family(
    name="flux2",
    model_class="Flux2Transformer2DModel",
    native_classes=("Flux2",),
    file=FileLayout(
        detect=lambda shapes: all(key in shapes for key in _NEEDED),
        configure=_configure,
        key_map=_key_map,
        aliases=NORM_ALIASES,
    ),
    blocks=Blocks(
        lists=(BlockList(DOUBLE), BlockList(SINGLE, joined=True, values=None)),
        counts=block_counts,
        prologue=("x_embedder", "context_embedder"),
        epilogue=("norm_out", "proj_out"),
        native=NATIVE_BLOCKS,
        native_patches=NATIVE_PATCHES,
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=("y", "guidance", *ACCEPTS),
        options=(OPTION,),
        token_tensors=("context",),
        vector_tensors=("guidance",),
    ),
    forward=Forward(
        arguments=_arguments,
        time_embed=TimeEmbed("time_guidance_embed", factor=1000.0),
        cached_modules={"pos_embed": CacheScope.BAND}
        | dict.fromkeys(("time_guidance_embed", *_MODULATION, "norm_out.linear"), CacheScope.CALL),
    ),
    half_dtypes=lambda _config: ("bf16", "fp16"),
    tensor_plan=_PLAN,
    patching=PATCHING,
)
