"""SCAIL and SCAIL-2 (ComfyUI's SCAILWanModel): pictures of a character and a pose video are tokens after the video's."""

from typing import Any

import torch
from torch import nn

from .wan import WanVariant, of_packed, register_variant, tokens


class WanSCAIL(WanVariant):
    """`mask_channels`: channels of SCAIL-2's masks, which tell several characters apart. None: SCAIL, without masks."""

    @register_variant
    def __init__(self, *, mask_channels: int | None = None, **wan: Any):
        super().__init__(**wan)
        video, pose = (self.patches(self.config["in_channels"]) for _ in range(2))
        self.patch_embedding = CharacterPatches(video, pose, None if mask_channels is None else self.patches(mask_channels))


class CharacterPatches(nn.Module):
    """Patch embedding: video and pictures share weights, the pose has others, and embedded masks are added."""

    def __init__(self, video: nn.Conv3d, pose: nn.Conv3d, mask: nn.Conv3d | None):
        super().__init__()
        self.video, self.pose, self.mask = video, pose, mask

    def forward(
        self,
        video: torch.Tensor,
        mask: torch.Tensor | None,
        references: torch.Tensor | None,
        kinds: torch.Tensor | None,
    ) -> torch.Tensor:
        """[b, C, T, H, W], its `mask` [b, mask channels, T, H, W] -> [b, n + R, width].

        `references` [b, R, values]: patches of a latent, then patches of its mask if the model has masks. `kinds` [b, R, 2]:
        1 for tokens of the pose; 1 for tokens with a mask.
        """
        embedded = self.video(video)
        embedded = tokens(embedded if mask is None or self.mask is None else embedded + self.mask(mask))
        if references is None or kinds is None:
            return embedded
        latent = references[..., : self.video.weight[0].numel()]
        posed, masked = kinds.to(embedded.dtype).split(1, dim=-1)
        others = torch.where(posed > 0, of_packed(self.pose, latent), of_packed(self.video, latent))
        if self.mask is not None:
            others = others + masked * of_packed(self.mask, references[..., latent.shape[-1] :])
        return torch.cat((embedded, others), dim=1)
