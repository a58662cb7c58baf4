"""What LTX-Video and LTX-2 share."""

from dataclasses import dataclass

import torch

from ..base.patching import Companion, Patching

PIXELS = (8, 32, 32)
"""Frames, rows and columns of pixels that a video token stands for."""
FRAME_RATE = 25.0
"""Frames per second, as in ComfyUI, if the conditioning names none."""
TIME = 1000.0
"""Factor between ComfyUI's sigma and the model's timestep."""


@dataclass(frozen=True)
class Patchifier:
    """Stand-in for an attribute of ComfyUI's native models, with which BaseModel makes a time for each token."""

    patching: Patching | Companion

    def patchify(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Tokens [B, N, C] of a latent, a video's in the order of frames, rows, columns."""
        frames_first = self.patching.cut("frames") if isinstance(self.patching, Patching) else self.patching
        return frames_first.pack(latent), None
