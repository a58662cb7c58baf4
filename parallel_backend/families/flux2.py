"""Flux.2 (dev, klein): Flux.1's two kinds of blocks with one modulation for all of a kind, joint sequence [text, image].

Tokens are single latent pixels. Layers have no biases, feed-forwards are SwiGLU, and a single block's attention and
feed-forward are one layer in and one layer out. Key layouts: black-forest-labs/flux2 (which ComfyUI's files use) and
diffusers' Flux2Transformer2DModel.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from .base.blocks import BlockList
from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed, cached
from .base.file_layout import FileLayout, Source
from .base.patching import Patching
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import HEADS, ROW, WIDTH, CutKind, LayerCut
from .parts import flux_blocks
from .parts.conditioning import text
from .parts.epsilons import UNNAMED
from .parts.key_map import WEIGHT, KeyMap
from .parts.references import ACCEPTS, reference_tensors
from .parts.rope import OPTION, rope_tensors

PATCHING = Patching(side=1)
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
    flux_blocks.DOUBLE: flux_blocks.ATTENTION_PLAN
    | dict.fromkeys(("ff.linear_in", "ff_context.linear_in"), _GATED)
    | dict.fromkeys(("ff.linear_out", "ff_context.linear_out"), ROW),
    flux_blocks.SINGLE: {"attn.to_qkv_mlp_proj": _QKV_GATED, "attn.to_out": flux_blocks.BOTH_ROWS},
}


def _configure(shapes: Shapes) -> Config:
    config = flux_blocks.sizes(shapes)
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
    embedders = {_TIME: "time_in"} | ({_GUIDANCE: "guidance_in"} if config["guidance_embeds"] else {})
    flux_blocks.outside_keys(keys, embedders, WEIGHT)
    keys.copy({f"{name}.linear": f"{name}.lin" for name in _MODULATION}, WEIGHT)
    flux_blocks.double_keys(keys, config, _FEED_FORWARD, WEIGHT)
    for block in keys.each(flux_blocks.SINGLE, "single_blocks", config["num_single_layers"]):
        block.copy({"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}, WEIGHT)
        block.copy(flux_blocks.SINGLE_NORMS, flux_blocks.SCALE)
    return keys.sources


def _arguments(step: StepInputs, _config: Config) -> dict[str, Any]:
    # This forward reads its inputs' dtype and the text's length before it embeds them, so stages without them give zeros.
    text = step.tensors.get("context")
    return flux_blocks.token_arguments(step) | {
        "hidden_states": step.image_tensor(),
        "encoder_hidden_states": step.zeros(len(step.text)) if text is None else text,
        "img_ids": F.pad(step.positions(), (0, 1)),
        "txt_ids": F.pad(step.text_numbers[:, None], (3, 0)),
        "guidance": step.tensors.get("guidance"),
    }


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {"context": text("Flux.2", config["joint_attention_dim"], call)}
    tensors |= reference_tensors(PATCHING, call, method="index", step=10.0) | rope_tensors(call)
    if config["guidance_embeds"] and call.get("guidance") is not None:
        tensors["guidance"] = call["guidance"]
    return tensors


FLUX2 = Family(
    name="flux2",
    model_class="Flux2Transformer2DModel",
    native_classes=("Flux2",),
    fused_module="parallel_backend.families.models.fused_flux2",
    file=FileLayout(
        detect=lambda shapes: all(key in shapes for key in _NEEDED),
        configure=_configure,
        key_map=_key_map,
        aliases=flux_blocks.NORM_ALIASES,
    ),
    blocks=replace(
        flux_blocks.BLOCKS,
        lists=(BlockList(flux_blocks.DOUBLE), BlockList(flux_blocks.SINGLE, joined=True, values_first=False)),
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
        cached_modules=cached(call=("time_guidance_embed", *_MODULATION, "norm_out.linear"), band=("pos_embed",)),
    ),
    half_dtypes=lambda _config: ("bf16", "fp16"),
    tensor_plan=_PLAN,
    patching=PATCHING,
    epsilons=UNNAMED,
)
