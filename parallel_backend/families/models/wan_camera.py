"""Wan with camera control (ComfyUI's CameraWanModel): embedded rays of the camera's path are added to the video's tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..parts.wan import PIXELS
from .wan import WanVariant, register_variant, tokens


class WanCamera(WanVariant):
    """`control_channels`: channels of the camera's rays."""

    @register_variant
    def __init__(self, *, control_channels: int = 24, **wan: Any):
        super().__init__(**wan)
        adapter = CameraAdapter(control_channels, self.width, self.config["patch_size"][1:])
        self.patch_embedding = GuidedPatches(self.patches(self.config["in_channels"]), adapter)


class GuidedPatches(nn.Module):
    """Patch embedding of the video plus that of the camera's rays."""

    def __init__(self, video: nn.Conv3d, camera: "CameraAdapter"):
        super().__init__()
        self.video, self.camera = video, camera

    def forward(self, video: torch.Tensor, camera: torch.Tensor | None) -> torch.Tensor:
        """[b, C, T, H, W] and [b, control channels, T, 8 H, 8 W] -> [b, n, width]."""
        embedded = self.video(video)
        return tokens(embedded if camera is None else embedded + self.camera(camera))


class CameraAdapter(nn.Module):
    """Turns the camera rays of each frame into one embedding for each patch of the latent."""

    def __init__(self, channels: int, width: int, patch: tuple[int, int]):
        super().__init__()
        self.conv = nn.Conv2d(channels * PIXELS**2, width, kernel_size=patch, stride=patch)
        self.conv1 = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1)

    def forward(self, camera: torch.Tensor) -> torch.Tensor:
        """[b, channels, T, 8 H, 8 W] -> [b, width, T, H / 2, W / 2]."""
        frames = self.conv(F.pixel_unshuffle(camera.transpose(1, 2).flatten(0, 1), PIXELS))
        frames = frames + self.conv2(self.conv1(frames).relu())
        return frames.unflatten(0, (len(camera), -1)).transpose(1, 2)
