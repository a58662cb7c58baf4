"""A small autoencoder of images in the form of ComfyUI's, for tests without ComfyUI. Ranks build it as they build those, if
they have imported this file (fork_server.py)."""

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.own_class.built import module_tree

module_tree.ROOTS = (*module_tree.ROOTS, __name__)
SCALE = 4
"""Rows and columns of pixels for each one of the latent."""
GROUPS = 32


def one_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over all pixels, [B, C, H, W] each."""
    q_BNC, k_BNC, v_BNC = (x.flatten(2).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q_BNC, k_BNC, v_BNC).transpose(1, 2).reshape(q.shape)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(GROUPS, inputs, eps=1e-6), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.conv(F.silu(self.norm(x)))


class Attention(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels, eps=1e-6)
        self.q, self.k, self.v, self.out = (nn.Conv2d(channels, channels, 1) for _ in range(4))
        self.attend = one_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.out(self.attend(self.q(h), self.k(h), self.v(h)))


class Down(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class SmallVAE(nn.Module):
    """Its latents have `channels`."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, padding_mode="reflect"),
            *(Block(width, width), Down(width), Block(width, width), Down(width), Attention(width)),
            nn.Conv2d(width, channels, 3, padding=1),
        )
        up = nn.Upsample(scale_factor=2, mode="nearest")
        self.decoder = nn.Sequential(
            nn.Conv2d(channels, 2 * width, 3, padding=1),
            *(Block(2 * width, 2 * width), Attention(2 * width), Block(2 * width, width)),
            *(up, Block(width, width), up, Block(width, width), nn.GroupNorm(GROUPS, width, eps=1e-6)),
            nn.Conv2d(width, 3, 3, padding=1),
        )

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """[B, channels, h, w] -> [B, 3, 4 h, 4 w]."""
        return self.decoder(latent)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, 3, 4 h, 4 w] -> [B, channels, h, w]."""
        return self.encoder(pixels)


class PooledVAE(SmallVAE):
    """Its picture depends on a mean over all pixels, which no band knows."""

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        return super().decode(latent - latent.mean(dim=(2, 3), keepdim=True))


class WideVAE(SmallVAE):
    """Its picture depends on two rows on either side."""

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        kernel = torch.ones(latent.shape[1], 1, 5, 5, dtype=latent.dtype, device=latent.device) / 25
        return super().decode(F.conv2d(latent, kernel, None, 1, 2, 1, latent.shape[1]))
