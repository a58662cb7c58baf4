"""Wan Animate 2: a character's picture moves as a person in another video. Only its header tells a file from Wan's."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from .base.blocks import PAIRED
from .base.file_layout import Source
from .base.step_inputs import Config, StepInputs
from .parts import wan
from .parts.conditioning import hidden
from .parts.cross_attention import block_plan
from .wan_animate import FACE, WAN_ANIMATE

KIND = "animate2"


def _key_map(config: Config) -> dict[str, Source]:
    return wan.key_map(config, "patch_embedding.video").sources


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As wan.conditioning, and `reference` [B]: strength of frame 0. With a pose also `pose` [B, 16, T - 1, H, W] in whole
    patches, `pose_strength` [B], and the pose's text and CLIP tokens `pose_context` and `pose_picture`."""
    tensors = wan.conditioning(config, call)
    batch = len(tensors["context"])
    tensors["reference"] = torch.full((batch,), float(call.get("reference_strength", 1.0)))
    if (pose := call.get("pose_latents")) is None:
        return tensors
    pose_text = {"context": call.get("context_pose"), "clip_fea": call.get("clip_fea_pose")}
    text = wan.conditioning(config, call | {name: value for name, value in pose_text.items() if value is not None})
    if ("picture" in text) != ("picture" in tensors):
        raise ValueError(
            "positive, negative: the pose has a CLIP vision output and the video has none, which cannot be forwarded to "
            "Parallel DiT's ranks in this version. Connect clip_vision_output too."
        )
    if text["context"].shape != tensors["context"].shape:
        lengths = text["context"].shape[1], tensors["context"].shape[1]
        raise ValueError(
            f"positive, negative: the pose's prompt has {lengths[0]} tokens, the video's has {lengths[1]}, which cannot be "
            "forwarded to Parallel DiT's ranks in this version. Shorten the longer one."
        )
    tensors |= {f"pose_{name}": value for name, value in text.items()}
    tensors["pose"] = F.pad(pose, (0, pose.shape[-1] % 2, 0, pose.shape[-2] % 2, 0, 0), mode="circular")
    return tensors | {"pose_strength": torch.full((batch,), float(call.get("pose_strength", 1.0)))}


def _check_grid(grid: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> None:
    if "pose" in tensors:
        frames, *sides = tensors["pose"].shape[2:]
        wan.check_sizes("the pose video, with a frame for the reference image,", grid, (frames + 1, *sides))


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    block_inputs: dict[str, Any] = {"reference": step.tensors["reference"]}
    block_inputs |= {name: step.tensors.get(f"pose_{theirs}") for name, theirs in _OF_POSE.items()}
    return wan.arguments(step, config) | {"patch_inputs": {"pose": step.tensors.get("pose")}, "block_inputs": block_inputs}


_OF_POSE = {"text": "context", "picture": "picture", "strength": "strength"}


def _example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    tensors = wan.example(config, text_tokens)
    return tensors | {"pose_context": tensors["context"], "reference": torch.ones(1), "pose_strength": torch.ones(1)}


WAN_ANIMATE_2 = replace(
    WAN_ANIMATE,
    name="wan-animate-2",
    model_class="WanAnimate2",
    class_module="parallel_backend.families.models.wan_animate_2",
    native_classes=("WAN_Animate2",),
    file=replace(
        WAN_ANIMATE.file,
        detect=lambda shapes: wan.is_wan(shapes) and FACE not in shapes,
        configure=wan.configure,
        key_map=_key_map,
        header=replace(wan.header(KIND), takes=lambda header: header.get("model_type") == KIND),
        ignored=wan.IGNORED,
    ),
    blocks=replace(
        WAN_ANIMATE.blocks,
        lists=(
            replace(
                WAN_ANIMATE.blocks.lists[0],
                attention={"attn1": PAIRED},
                values_first=False,
                cuts=wan.CUTS | dict.fromkeys(("pose_rotary_emb", "reference"), wan.CUTS["rotary_emb"]),
            ),
        ),
    ),
    sizes=replace(WAN_ANIMATE.sizes, hidden=lambda config: 2 * hidden(config)),
    inputs=replace(
        WAN_ANIMATE.inputs,
        conditioning=_conditioning,
        check_grid=_check_grid,
        accepts=(*wan.ACCEPTS, "pose_latents", "context_pose", "clip_fea_pose", "pose_strength", "reference_strength"),
        options=(),
        vector_tensors=(*wan.VECTORS, "reference", *(f"pose_{theirs}" for theirs in _OF_POSE.values())),
        example=_example,
    ),
    forward=replace(WAN_ANIMATE.forward, arguments=_arguments, cached_modules=wan.CACHED),
    tensor_plan={"blocks": block_plan("ffn")},
)
