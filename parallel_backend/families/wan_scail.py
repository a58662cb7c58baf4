"""SCAIL and SCAIL-2: characters from pictures move as a pose video does."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from .base.family import cached
from .base.file_layout import Source
from .base.step_inputs import REFERENCE_POSITIONS, REFERENCES, Config, Shapes, StepInputs
from .parts import wan
from .wan import WAN

ASIDE = 120.0
"""Distance in positions: columns from a video to its pose, rows from a video to pictures that replace a character in it."""


def _configure(shapes: Shapes) -> Config:
    return wan.configure(shapes) | {"mask_channels": shapes.get("patch_embedding_mask.weight", (None, None))[1]}


def _key_map(config: Config) -> dict[str, Source]:
    keys = wan.key_map(config, "patch_embedding.video")
    keys.copy({"patch_embedding.pose": "patch_embedding_pose"})
    if config["mask_channels"] is not None:
        keys.copy({"patch_embedding.mask": "patch_embedding_mask"})
    return keys.sources


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As Wan's and, if the call has them: `mask` [B, mask_channels, T, H, W] of the video; REFERENCES, of pictures and the
    pose, with their masks; REFERENCE_POSITIONS [B, R, 7]: frame, row and column (of the pose in the pose's grid), 1 for the
    pose's, 1 for tokens with a mask, rows and columns of the token's grid.
    """
    tensors, masks = wan.conditioning(config, call), config["mask_channels"]
    videos = {name: call.get(name) for name in ("reference_latent", "pose_latents", "ref_mask_latents", "sam_latents")}
    for name, video in videos.items():
        if video is not None and (video.shape[-2] % 2 or video.shape[-1] % 2):
            raise ValueError(f"positive, negative: '{name}' has an odd size in latent pixels. Use multiples of 16.")
    pictures, pose, picture_mask, pose_mask = videos.values()
    count = 0 if pictures is None else pictures.shape[2]
    if picture_mask is not None:
        tensors["mask"] = picture_mask[:, :, count:]
        picture_mask = picture_mask[:, :, :count]
    replaces = call.get("ref_mask_flag") is not None and not bool(call["ref_mask_flag"])
    # ComfyUI puts the pictures before the video. Only differences of positions count, so here the video begins at frame 0.
    earlier, below = (max(count - 1, 0), ASIDE) if replaces else (count, 0.0)
    references = [
        _reference(video, mask, masks, shift, posed)
        for video, mask, shift, posed in (
            (pictures, picture_mask, (-earlier, below, 0.0), False),
            (pose, pose_mask, (0.0, 0.0, 0.0), True),
        )
        if video is not None
    ]
    return tensors | (wan.references(*map(list, zip(*references, strict=True))) if references else {})


def _reference(
    video: torch.Tensor, mask: torch.Tensor | None, channels: int | None, shift: tuple[float, ...], posed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, R, values] and REFERENCE_POSITIONS [R, 7] of pictures or of the pose (`posed`)."""
    packed, positions = wan.packed(video)
    if channels is not None:
        blank = video.new_zeros(len(video), channels, *video.shape[2:])
        packed = torch.cat((packed, wan.packed(blank if mask is None else mask)[0]), dim=-1)
    _, rows, columns = wan.PATCHING.grid(tuple(video.shape))
    rest = torch.tensor([float(posed), float(mask is not None), float(rows), float(columns)])
    return packed, torch.cat((positions + torch.tensor(shift), rest.expand(len(positions), -1)), dim=1)


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    positions, kinds = step.tensors.get(REFERENCE_POSITIONS), None
    if positions is not None:
        frame, sides, kinds, sizes = positions.split((1, 2, 2, 2), dim=-1)
        # A pose of any size is stretched to the video's grid: its patches' middles lie at fractions of rows and columns.
        _, rows, columns = step.grid
        scale = torch.stack((rows / sizes[..., 0], columns / sizes[..., 1]), dim=-1)
        middles = sides * scale + (scale - 1) / 2
        middles = middles + F.pad(torch.full_like(middles[..., 1:], ASIDE), (1, 0))
        sides = torch.where(kinds[..., :1] > 0, middles, sides)
        positions = torch.cat((frame, sides, torch.zeros_like(frame)), dim=-1)
    embedded = {"mask": step.tensors.get("mask"), "references": step.tensors.get(REFERENCES), "kinds": kinds}
    return wan.arguments(step, config) | {"positions": positions, "patch_inputs": embedded}


WAN_SCAIL = replace(
    WAN,
    name="wan-scail",
    model_class="WanSCAIL",
    class_module="parallel_backend.families.models.wan_scail",
    native_classes=("WAN21_SCAIL", "WAN21_SCAIL2"),
    file=replace(
        WAN.file,
        detect=lambda shapes: wan.kind(shapes) in ("scail", "scail2"),
        configure=_configure,
        key_map=_key_map,
        header=wan.header(
            model_type=lambda config: ("scail",) if config["mask_channels"] is None else ("scail2",),
            mask_in_dim=lambda config: (config["mask_channels"],),
        ),
    ),
    blocks=replace(WAN.blocks, segments=None),
    inputs=replace(
        WAN.inputs,
        conditioning=_conditioning,
        check_grid=wan.size_check("mask", "the mask of the characters"),
        accepts=(*wan.ACCEPTS, "reference_latent", "pose_latents", "ref_mask_latents", "sam_latents", "ref_mask_flag"),
        options=(),  # ComfyUI's class scales the positions of references in another way
    ),
    forward=replace(
        WAN.forward,
        arguments=_arguments,
        cached_modules={**WAN.forward.cached_modules, **cached(prompt=("patch_embedding.mask",))},
    ),
)
