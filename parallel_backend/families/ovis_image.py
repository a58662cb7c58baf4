"""Ovis-Image: Flux.1's blocks with SwiGLU feed-forwards, without pooled text and guidance, joint sequence [text, image].

Words lie on a diagonal of rows and columns, which also count the picture's. Key layouts: black-forest-labs/flux with
feed-forwards of three layers (which ComfyUI's files use), and diffusers' OvisImageTransformer2DModel, which joins two of
these layers.
"""

from dataclasses import replace
from typing import Any

import torch

from parallel_backend.core.spans import Span

from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed
from .base.file_layout import FileLayout, FolderLayout, Source
from .base.patching import Patching
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN, GATHER, ROW, WIDTH, CutKind, LayerCut
from .parts import flux_blocks
from .parts.conditioning import hidden, text
from .parts.epsilons import FLOAT32, UNNAMED
from .parts.key_map import KeyMap
from .parts.references import ACCEPTS, reference_tensors
from .parts.rope import OPTION, rope_tensors

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
    flux_blocks.DOUBLE: flux_blocks.ATTENTION_PLAN
    | dict.fromkeys(_COLUMNS, COLUMN)
    | dict.fromkeys(("ff.down_proj", "ff_context.down_proj"), ROW)
    | dict.fromkeys(flux_blocks.DOUBLE_MODULATION, GATHER),
    flux_blocks.SINGLE: flux_blocks.SINGLE_PLAN
    | {"proj_mlp": LayerCut(CutKind.COLUMN, (WIDTH, WIDTH)), "norm.linear": GATHER},
}
"""In a single block one layer gives the feed-forward's value and gate, two parts that are cut one by one."""


def _configure(shapes: Shapes) -> Config:
    config = flux_blocks.sizes(shapes)
    return config | {"axes_dims_rope": flux_blocks.rope_axes(config["attention_head_dim"])}


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    flux_blocks.outside_keys(keys, {"timestep_embedder": "time_in"})
    keys.copy({"context_embedder_norm": "txt_norm"}, flux_blocks.SCALE)
    flux_blocks.double_keys(keys, config, _FEED_FORWARD | flux_blocks.DOUBLE_MODULATION)
    flux_blocks.single_keys(keys, config, flux_blocks.SINGLE_MODULATION, feed_forward=8)
    return keys.sources


def _folder_source(config: Config, parameter: str) -> Source:
    """In diffusers one layer gives a double block's value and gate, and layers have other names."""
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
    words = step.text_tensor("context", config["joint_attention_dim"])  # a norm reads their shape on every stage
    return flux_blocks.token_arguments(step) | {"encoder_hidden_states": words, "txt_ids": flux_blocks.diagonal(step)}


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    words = text("Ovis-Image", config["joint_attention_dim"], call)
    return {"context": words} | reference_tensors(Patching(), call, method="offset") | rope_tensors(call)


OVIS_IMAGE = Family(
    name="ovis-image",
    model_class="OvisImageTransformer2DModel",
    class_module="parallel_backend.families.models.ovis_image",
    native_classes=("FluxSchnell",),  # ComfyUI detects it as Flux: its class computes all of them
    file=FileLayout(
        detect=lambda shapes: all(key in shapes for key in _NEEDED) and any(norm in shapes for norm in _NORMS),
        configure=_configure,
        key_map=_key_map,
        aliases=flux_blocks.NORM_ALIASES,
        folder=FolderLayout(source=_folder_source),
    ),
    blocks=replace(flux_blocks.BLOCKS, prologue=("x_embedder", "context_embedder_norm", "context_embedder")),
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
        cached_modules=flux_blocks.cached_modules("timestep_embedder"),
    ),
    half_dtypes=lambda _config: ("bf16", "fp16"),
    tensor_plan=_PLAN,
    epsilons=UNNAMED | {"context_embedder_norm": FLOAT32},
)
