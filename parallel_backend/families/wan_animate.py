"""Wan 2.2 Animate: animates the picture of a character after a video of poses and a video of a face."""

from typing import Any

import torch

from .base.blocks import Blocks
from .base.family import Family, Forward, Inputs, Sizes, cached
from .base.file_layout import FileLayout, Source
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN_BY_HEADS, ROW_BY_HEADS
from .parts import wan
from .parts.conditioning import count_blocks, hidden
from .parts.cross_attention import block_list, block_plan
from .parts.key_map import WEIGHT, KeyMap

EVERY = 5
"""Blocks from one face adapter to the next. No file says it."""
CONVOLUTIONS = "motion_encoder.enc.net_app.convs."
FACE = "face_adapter.fuser_blocks.0.k_norm.weight"
"""A key that no other Wan has."""


def _configure(shapes: Shapes) -> Config:
    config = wan.configure(shapes)
    blocks = count_blocks(shapes, CONVOLUTIONS) - 2
    outputs = [shapes[f"{CONVOLUTIONS}0.0.weight"][0]]
    outputs += [shapes[f"{CONVOLUTIONS}{index}.conv2.1.weight"][0] for index in range(1, blocks + 1)]
    sides = [2 ** (blocks + 2 - index) for index in range(blocks + 1)]  # of the last one's output: four
    hidden_dim = shapes["face_encoder.conv2.conv.weight"][0]
    looks = count_blocks(shapes, "face_adapter.fuser_blocks.")
    if looks != len(range(0, config["num_layers"], EVERY)):
        raise ValueError(f"model_name: this Wan Animate has {looks} face adapters for {config['num_layers']} blocks.")
    return config | {
        "latent_channels": shapes["pose_patch_embedding.weight"][1],
        "motion_encoder_size": sides[0],
        "motion_encoder_channel_sizes": {str(side): count for side, count in zip(sides, outputs, strict=True)},
        "motion_style_dim": shapes[f"{CONVOLUTIONS}{blocks + 1}.weight"][0],
        "motion_dim": shapes["motion_encoder.dec.direction.weight"][1],
        "motion_encoder_dim": shapes["motion_encoder.dec.direction.weight"][0],
        "face_encoder_hidden_dim": hidden_dim,
        "face_encoder_num_heads": shapes["face_encoder.conv1_local.conv.weight"][0] // hidden_dim,
        "inject_face_latents_blocks": EVERY,
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys = wan.key_map(config, "patch_embedding.video")
    keys.copy({"patch_embedding.pose": "pose_patch_embedding"})
    face = keys.inside("faces.face_encoder.", "face_encoder.")
    face.copy({name: f"{name}.conv" for name in ("conv1_local", "conv2", "conv3")})
    face.same("out_proj")
    face.tensor("padding_tokens")
    _add_motion(keys.inside("faces.motion_encoder.", "motion_encoder."), len(config["motion_encoder_channel_sizes"]) - 1)
    width = hidden(config)
    for number, index in enumerate(range(0, config["num_layers"], config["inject_face_latents_blocks"])):
        look = keys.inside(f"blocks.{index}.face.", f"face_adapter.fuser_blocks.{number}.")
        look.split("linear1_kv", {"to_k": width, "to_v": width})
        look.copy({"to_q": "linear1_q", "to_out": "linear2"})
        look.copy({"norm_q": "q_norm", "norm_k": "k_norm"}, WEIGHT)
    return keys.sources


def _add_motion(motion: KeyMap, blocks: int) -> None:
    """Adds the motion encoder. `blocks`: number of its residual blocks."""
    motion.tensor("motion_synthesis_weight", "dec.direction.weight")
    motion.copy({f"motion_network.{index}": f"enc.fc.{index}" for index in range(5)})
    layers = motion.inside("", "enc.net_app.convs.")
    layers.tensor("conv_in.weight", "0.0.weight")
    layers.tensor("conv_in.act_fn.bias", "0.1.bias")
    layers.tensor("conv_out.weight", f"{blocks + 1}.weight")
    for index in range(blocks):
        block = layers.inside(f"res_blocks.{index}.", f"{index + 1}.")
        block.tensor("conv1.weight", "conv1.0.weight")
        block.tensor("conv1.act_fn.bias", "conv1.1.bias")
        block.tensor("conv2.weight", "conv2.1.weight")
        block.tensor("conv2.act_fn.bias", "conv2.2.bias")
        block.tensor("conv_skip.weight", "skip.1.weight")


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As wan.conditioning. If the call has them, also `pose` [B, 16, t, H, W] in whole patches, `faces` [B, 3, t, S, S]."""
    tensors, side = wan.conditioning(config, call), config["motion_encoder_size"]
    faces = call.get("face_pixel_values")
    if faces is not None and tuple(faces.shape[-2:]) != (side, side):
        raise ValueError(
            f"positive, negative: the face video is {faces.shape[-1]} x {faces.shape[-2]}, this model needs {side} x "
            f"{side}. WanAnimateToVideo makes it so."
        )
    further = {"pose": call.get("pose_latents"), "faces": faces}
    return tensors | {name: tensor for name, tensor in further.items() if tensor is not None}


def _check_grid(grid: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> None:
    if "pose" in tensors:
        sizes = tensors["pose"].shape[2:]
        wan.check_sizes("the pose video", (sizes[0], *grid[1:]), sizes)


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    return wan.arguments(step, config) | {
        "patch_inputs": {"pose": step.tensors.get("pose")},  # of the first stage
        "block_inputs": {"faces": step.tensors.get("faces")},
    }


_LOOK_PLAN = dict.fromkeys(("face.to_q", "face.to_k", "face.to_v"), COLUMN_BY_HEADS) | {"face.to_out": ROW_BY_HEADS}

WAN_ANIMATE = Family(
    name="wan-animate",
    model_class="WanAnimateTransformer3DModel",
    class_module="parallel_backend.families.models.wan_animate",
    native_classes=("WAN22_Animate",),
    file=FileLayout(
        detect=lambda shapes: wan.is_wan(shapes) and FACE in shapes,
        configure=_configure,
        key_map=_key_map,
        header=wan.header("animate", motion_encoder_dim=lambda config: (config["motion_encoder_dim"],)),
        ignored=(*wan.IGNORED, r"motion_encoder\..*\.kernel"),
    ),
    blocks=Blocks(
        lists=(
            block_list(
                "blocks",
                cuts=wan.CUTS | {"seen": lambda seen, rows: rows.of_image(seen, 0)},
            ),
        ),
        counts=lambda config: {"blocks": config["num_layers"]},
        prologue=("patch_embedding",),
        epilogue=("norm_out", "proj_out"),
        native=None,  # a replaced block would skip the face adapter too
        native_patches=("attn1_patch", "attn2_patch", "double_block"),
    ),
    sizes=Sizes(
        latent_channels=lambda config: config["in_channels"],
        max_side=lambda config: config["rope_max_seq_len"],
    ),
    inputs=Inputs(
        conditioning=_conditioning,
        check_grid=_check_grid,
        accepts=(*wan.ACCEPTS, "pose_latents", "face_pixel_values"),
        options=wan.OPTIONS,
        vector_tensors=(*wan.VECTORS, "faces"),
        example=wan.example,
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        cached_modules={
            **wan.CACHED,
            **cached(
                call=("*.face.to_k", "*.face.to_v", "*.face.norm_k", "*.face.pre_norm_kv"),
                prompt=("faces", "patch_embedding.pose"),
            ),
        },
    ),
    half_dtypes=lambda _config: ("fp16", "bf16"),
    tensor_plan={"blocks": block_plan("ffn") | _LOOK_PLAN},
    patching=wan.PATCHING,
    native_values=wan.native_values,
)
