"""Ovis-Image: Flux.1's blocks with SwiGLU feed-forwards, without pooled text and guidance, joint sequence [text, image].

Text lies on a diagonal of rows and columns, over the picture's own. Key layouts: black-forest-labs/flux with feed-forwards
of three layers (which ComfyUI's files use), and diffusers' OvisImageTransformer2DModel, where two of these are one
(models/ovis_image.py).
"""

from typing import Any

import torch

from parallel_backend.core.spans import Span

from .base.blocks import BlockList, Blocks
from .base.family import CacheScope, Family, FileLayout, FolderLayout, Forward, Inputs, Sizes, Source, TimeEmbed
from .base.patching import Patching
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN, GATHER, ROW, WIDTH, CutKind, LayerCut
from .parts.conditioning import hidden, text
from .parts.flux_blocks import (
    ATTENTION_PLAN,
    DOUBLE,
    DOUBLE_MODULATION,
    NATIVE_BLOCKS,
    NATIVE_PATCHES,
    NORM_ALIASES,
    SCALE,
    SINGLE,
    SINGLE_PLAN,
    block_counts,
    diagonal,
    double_keys,
    rope_axes,
    single_keys,
    sizes,
    token_arguments,
)
from .parts.key_map import KeyMap
from .parts.references import ACCEPTS, reference_tensors
from .parts.rope import OPTION, rope_tensors, scale_and_shift

_OUTSIDE = {  # diffusers module <- original module
    "timestep_embedder.linear_1": "time_in.in_layer",
    "timestep_embedder.linear_2": "time_in.out_layer",
    "context_embedder": "txt_in",
    "x_embedder": "img_in",
    "proj_out": "final_layer.linear",
}
_LAYERS = ("gate_proj", "up_proj", "down_proj")
_FEED_FORWARD = {f"ff.{layer}": f"img_mlp.{layer}" for layer in _LAYERS}
_FEED_FORWARD |= {f"ff_context.{layer}": f"txt_mlp.{layer}" for layer in _LAYERS}
_NEEDED = (
    "double_blocks.0.img_mod.lin.weight",
    "double_blocks.0.img_mlp.gate_proj.weight",
    "single_blocks.0.linear1.weight",
)
_NORMS = ("txt_norm.scale", "txt_norm.weight")
_COLUMNS = ("ff.gate_proj", "ff.up_proj", "ff_context.gate_proj", "ff_context.up_proj")
_PLAN = {
    DOUBLE: ATTENTION_PLAN
    | dict.fromkeys(_COLUMNS, COLUMN)
    | dict.fromkeys(("ff.down_proj", "ff_context.down_proj"), ROW)
    | dict.fromkeys(("norm1.linear", "norm1_context.linear"), GATHER),
    SINGLE: SINGLE_PLAN | {"proj_mlp": LayerCut(CutKind.COLUMN, (WIDTH, WIDTH)), "norm.linear": GATHER},
}
"""Of a single block's feed-forward value and gate are one layer, each cut on its own."""


def _configure(shapes: Shapes) -> Config:
    config = sizes(shapes)
    return config | {"axes_dims_rope": rope_axes(config["attention_head_dim"])}


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    keys.copy(_OUTSIDE)
    keys.copy({"context_embedder_norm": "txt_norm"}, SCALE)
    keys.copy({"norm_out.linear": "final_layer.adaLN_modulation.1"}, swap_halves=True)
    double_keys(keys, config, _FEED_FORWARD | DOUBLE_MODULATION)
    single_keys(keys, config, {"norm.linear": "modulation.lin"}, feed_forward=8)
    return keys.sources


def _folder_source(config: Config, parameter: str) -> Source:
    """diffusers has value and gate of a double block's feed-forward in one layer, and names of its own."""
    _, _, rest = parameter.rpartition(".ff")
    match rest.removeprefix("_context").split("."):
        case ["", "down_proj", leaf]:
            return Source(f"{parameter.removesuffix(f'down_proj.{leaf}')}net.2.{leaf}")
        case ["", "up_proj" | "gate_proj" as layer, leaf]:
            inner = 4 * hidden(config)
            rows = Span(0, inner) if layer == "up_proj" else Span(inner, 2 * inner)
            return Source(f"{parameter.removesuffix(f'{layer}.{leaf}')}net.0.proj.{leaf}", rows)
        case _:
            return Source(parameter)


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    words = step.text_tensor("context", config["joint_attention_dim"])  # a norm looks at them on every stage
    return token_arguments(step) | {"encoder_hidden_states": words, "txt_ids": diagonal(step)}


def _conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    words = text("Ovis-Image", config["joint_attention_dim"], given)
    scale, shift = scale_and_shift(given)
    references = reference_tensors(Patching(), given, method="offset", scale=scale, shift=shift)
    return {"context": words} | references | rope_tensors(given)


OVIS_IMAGE = Family(
    name="ovis-image",
    model_class="OvisImageTransformer2DModel",
    class_module="parallel_backend.families.models.ovis_image",
    native_classes=("FluxSchnell",),  # which ComfyUI takes it for: its class of Flux computes all of them
    file=FileLayout(
        detect=lambda shapes: all(key in shapes for key in _NEEDED) and any(norm in shapes for norm in _NORMS),
        configure=_configure,
        key_map=_key_map,
        aliases=NORM_ALIASES,
        folder=FolderLayout(source=_folder_source),
    ),
    blocks=Blocks(
        lists=(BlockList(DOUBLE), BlockList(SINGLE)),
        counts=block_counts,
        prologue=("x_embedder", "context_embedder_norm", "context_embedder"),
        epilogue=("norm_out", "proj_out"),
        native=NATIVE_BLOCKS,
        native_patches=NATIVE_PATCHES,
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"] // 4),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=("y", "guidance", *ACCEPTS),
        options=(OPTION,),
        token_tensors=("context",),
    ),
    forward=Forward(
        arguments=_arguments,
        time_embed=TimeEmbed("time_proj", factor=1000.0),
        cached_modules={"pos_embed": CacheScope.BAND}
        | dict.fromkeys(
            ("timestep_embedder", "*.norm1.linear", "*.norm1_context.linear", "*.norm.linear", "norm_out.linear"),
            CacheScope.CALL,
        ),
    ),
    half_dtypes=lambda _config: ("bf16", "fp16"),
    tensor_plan=_PLAN,
)
