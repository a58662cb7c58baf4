"""What LTX-Video is given beside the latent: text, the frame rate, and where keyframes belong in time."""

from dataclasses import dataclass
from typing import Any

import torch

from parallel_backend.families.base.patching import Patching
from parallel_backend.families.base.step_inputs import Config, StepInputs
from parallel_backend.families.parts.conditioning import text

ACCEPTS = ("attention_mask", "frame_rate", "keyframe_idxs", "guide_attention_entries", "denoise_mask")
PIXELS = (8, 32, 32)
"""Frames, rows and columns of pixels that a token stands for."""
FRAME_RATE = 25.0
"""ComfyUI's, where the conditioning names none."""


def conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context` [B, T, caption_channels], `frame_rate` [B]; `mask` [B, T] bool, which text may be seen; `keyframes`
    [B, 3, K, 2] in pixels, of the last K tokens. ValueError for guides that want an attention of their own.

    The timesteps come from `denoise_mask`, which is only looked at for tokens that are none.
    """
    context = text("LTX-Video", config["caption_channels"], given)
    tensors = {"context": context, "frame_rate": torch.full((len(context),), float(given.get("frame_rate", FRAME_RATE)))}
    if (mask := given.get("attention_mask")) is not None:
        if mask.is_floating_point():
            raise ValueError("positive, negative: a text mask of weights cannot be forwarded. Use one of zeros and ones.")
        tensors["mask"] = mask.reshape(len(context), -1).bool()
    if (keyframes := given.get("keyframe_idxs")) is not None and keyframes.shape[2]:
        for guide in given.get("guide_attention_entries") or ():
            if guide["strength"] != 1.0 or guide["pixel_mask"] is not None:
                raise ValueError(
                    "positive, negative: a guide with a mask, or a strength other than 1, cannot be forwarded to Parallel "
                    "DiT's ranks in this version. Use a strength of 1 and no mask in LTXVAddGuide."
                )
        if (given["denoise_mask"] < 0).any():
            raise ValueError(
                "positive, negative: a guide of a lower resolution (IC-LoRA) cannot be forwarded to Parallel DiT's ranks in "
                "this version. Use one of the video's own size."
            )
        tensors["keyframes"] = keyframes
    return tensors


def coordinates(step: StepInputs, places: torch.Tensor, causal: bool) -> torch.Tensor:
    """[b, 3, n] float32 of tokens `places` [n]: seconds, row and column in pixels (comfy/ldm/lightricks/model.py).

    `causal`: the first latent frame is one frame of the video, as in LTX-Video 0.9.5 and later.
    """
    pixels = torch.stack(torch.unravel_index(places, step.grid)) * torch.tensor(PIXELS, device=places.device)[:, None]
    if causal:
        pixels[0] = (pixels[0] + 1 - PIXELS[0]).clamp(min=0)
    pixels = pixels.float().repeat(len(step.timestep), 1, 1)
    if (keyframes := step.tensors.get("keyframes")) is not None:
        number = places - (step.stream.image - keyframes.shape[2])
        pixels[:, :, number >= 0] = keyframes[:, :, number[number >= 0], 0].float()
    pixels[:, 0] /= step.tensors["frame_rate"][:, None]
    return pixels


@dataclass(frozen=True)
class Patchifier:
    """What ComfyUI's BaseModel makes a time for each token with, as an attribute of its native model."""

    patching: Patching

    def patchify(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Tokens [B, N, C] of a latent."""
        return self.patching.pack(latent), None


def example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    """Random values for what `conditioning` gives, of batch 1."""
    return {"context": torch.randn(1, text_tokens, config["caption_channels"]), "frame_rate": torch.full((1,), FRAME_RATE)}
