"""Stand-in for the patchifiers of ComfyUI's native LTX models, with which ComfyUI's BaseModel makes a time for each
token."""

from dataclasses import dataclass

import torch

from parallel_backend.families.base.patching import Companion, Patching


@dataclass(frozen=True)
class Patchifier:
    """Patchifier of the video's latent or of the sound's."""

    patching: Patching | Companion

    def patchify(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Tokens [B, N, C] of a latent, a video's in the order of frames, rows, columns."""
        frames_first = self.patching.cut("frames") if isinstance(self.patching, Patching) else self.patching
        return frames_first.pack(latent), None
