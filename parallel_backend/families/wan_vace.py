"""Wan VACE: a control video with a mask guides the generated video."""

from dataclasses import replace
from typing import Any

import torch

from .base.blocks import JOINT
from .base.family import cached
from .base.file_layout import FolderLayout, Source
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import GATHER
from .parts import wan
from .parts.conditioning import count_blocks, hidden
from .parts.cross_attention import TEXT_KEYS, block_plan
from .wan import WAN


def _configure(shapes: Shapes) -> Config:
    config = wan.configure(shapes)
    layers, controlled = config["num_layers"], count_blocks(shapes, "vace_blocks.")
    places = tuple(range(0, layers, layers // controlled))
    if len(places) != controlled:
        raise ValueError(f"model_name: {controlled} control blocks for {layers} blocks, which ComfyUI cannot place either.")
    return config | {"vace_layers": places, "vace_in_channels": shapes["vace_patch_embedding.weight"][1]}


def _key_map(config: Config) -> dict[str, Source]:
    keys = wan.key_map(config, "patch_embedding.video")
    keys.copy({"patch_embedding.control": "vace_patch_embedding"})
    for number, index in enumerate(config["vace_layers"]):
        block = keys.inside(f"blocks.{index}.vace.", f"vace_blocks.{number}.")
        wan.add_block(block, config)
        block.copy({"proj_out": "after_proj"} | ({"proj_in": "before_proj"} if index == 0 else {}))
    return keys.sources


def _folder_source(config: Config, parameter: str) -> Source:
    match parameter.split("."):
        case ["patch_embedding", stream, leaf]:
            return Source(f"{'vace_' if stream == 'control' else ''}patch_embedding.{leaf}")
        case ["blocks", index, "vace", *rest]:
            return Source(".".join(["vace_blocks", str(config["vace_layers"].index(int(index))), *rest]))
        case _:
            return Source(parameter)


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As Wan's, `control` [B, vace_in_channels, T, H, W] and its `strength` [B]. ValueError for several at once."""
    tensors = wan.conditioning(config, call)
    controls, strengths = call["vace_context"], call["vace_strength"]  # ComfyUI makes empty ones where there are none
    if controls.shape[1] > 1:
        raise ValueError(
            f"positive, negative: {controls.shape[1]} VACE controls at once cannot be forwarded to Parallel DiT's ranks in "
            "this version. Use one WanVaceToVideo."
        )
    return tensors | {"control": controls[:, 0], "strength": torch.full((len(controls),), float(strengths[0]))}


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    return wan.arguments(step, config) | {
        "patch_inputs": {"control": step.tensors.get("control")},  # of the first stage
        "block_inputs": {"strength": step.tensors["strength"]},
    }


_CONTROL_PLAN = {
    f"vace.{layer}": cut for layer, cut in (block_plan("ffn") | {"proj_in": GATHER, "proj_out": GATHER}).items()
}
_CONTROL_KEYS = {name.replace("*.", "*.vace."): scope for name, scope in TEXT_KEYS.items()}

WAN_VACE = replace(
    WAN,
    name="wan-vace",
    model_class="WanVACETransformer3DModel",
    class_module="parallel_backend.families.models.wan_vace",
    native_classes=("WAN21_Vace",),
    file=replace(
        WAN.file,
        detect=lambda shapes: wan.kind(shapes) == "vace",
        configure=_configure,
        key_map=_key_map,
        folder=FolderLayout(source=_folder_source),
        header=wan.header(
            "vace",
            vace_layers=lambda config: (len(config["vace_layers"]),),
            vace_in_dim=lambda config: (config["vace_in_channels"],),
        ),
    ),
    blocks=replace(
        WAN.blocks,
        lists=(replace(WAN.blocks.lists[0], attention={"attn1": JOINT, "vace.attn1": JOINT}),),
        native=None,  # a replaced block would skip the control block too
    ),
    sizes=replace(WAN.sizes, hidden=lambda config: 2 * hidden(config)),
    inputs=replace(
        WAN.inputs,
        conditioning=_conditioning,
        check_grid=wan.size_check("control", "the VACE control"),
        accepts=(*wan.ACCEPTS, "vace_context", "vace_strength"),
        options=wan.OPTIONS,
        vector_tensors=(*WAN.inputs.vector_tensors, "strength"),
        example=lambda config, tokens: wan.example(config, tokens) | {"strength": torch.ones(1)},
    ),
    forward=replace(
        WAN.forward,
        arguments=_arguments,
        cached_modules={**WAN.forward.cached_modules, **_CONTROL_KEYS, **cached(prompt=("patch_embedding.control",))},
    ),
    tensor_plan={"blocks": block_plan("ffn") | _CONTROL_PLAN},
)
