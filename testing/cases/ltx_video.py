"""LTX-Video: as 0.9 is called, and as 0.9.5 is, whose first latent frame is one frame of the video, with keyframes."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from diffusers.loaders.single_file_utils import convert_ltx_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file, save_file

from testing.cases.case import Case, Native

# Every LTX-Video has 32 heads and so many channels; four channels to a head is the least that a rotary embedding fills.
LTX = {
    "in_channels": 128,
    "out_channels": 128,
    "num_attention_heads": 32,
    "attention_head_dim": 4,
    "cross_attention_dim": 128,
    "num_layers": 3,
    "caption_channels": 24,
}
MASK = torch.arange(7) < torch.tensor([[7], [4]])
FRAME_RATE = 23.976
KEYFRAMES = 2


def _tensors(generator, batch):
    return {
        "context": torch.randn(batch, 7, LTX["caption_channels"], generator=generator),
        "mask": MASK.repeat(batch, 1)[:batch],
        "frame_rate": torch.full((batch,), FRAME_RATE),
    }


def _forward(model, x, timestep, tensors, **positions):
    out = model(
        hidden_states=x.flatten(2).transpose(1, 2),
        encoder_hidden_states=tensors["context"],
        encoder_attention_mask=tensors["mask"],
        timestep=timestep * 1000,
        return_dict=False,
        **positions,
    )[0]
    return out.transpose(1, 2).unflatten(2, x.shape[2:])


def _reference(model, x, timestep, tensors):
    """As LTXPipeline calls it."""
    frames, height, width = x.shape[2:]
    scale = (8 / FRAME_RATE, 32, 32)
    sizes = {"num_frames": frames, "height": height, "width": width, "rope_interpolation_scale": scale}
    return _forward(model, x, timestep, tensors, **sizes)


def _reference_of_keyframes(model, x, timestep, tensors):
    """As LTXConditionPipeline calls it, but for the keyframes' place: there they are in front, in ComfyUI at the end."""
    frames, height, width = (torch.arange(size) for size in x.shape[2:])
    pixels = torch.cartesian_prod((frames * 8 - 7).clamp(min=0), height * 32, width * 32).T.float().repeat(len(x), 1, 1)
    pixels[:, :, -tensors["keyframes"].shape[2] :] = tensors["keyframes"][..., 0].float()
    pixels[:, 0] *= 1 / FRAME_RATE
    return _forward(model, x, timestep.flatten(1), tensors, video_coords=pixels)


def _keyframes(height: int, width: int) -> torch.Tensor:
    """[1, 3, K, 2] of keyframes at the video's 18th and 31st frame."""
    tokens = torch.cartesian_prod(torch.tensor([17, 30]), torch.arange(height) * 32, torch.arange(width) * 32)
    return torch.stack((tokens, tokens + torch.tensor([1, 32, 32])), dim=-1).transpose(0, 1)[None]


@dataclass(frozen=True)
class WithKeyframes(Case):
    """The first frame and the keyframes are fixed in part: their times are fractions of the others'."""

    def save(self, model, path: Path, config=None) -> Path:
        """With the header that Lightricks' files have."""
        state = load_file(super().save(model, path, config))
        save_file(state, path, {"config": json.dumps({"transformer": {"causal_temporal_positioning": True}})})
        return path

    def save_folder(self, model, path: Path) -> None:
        """With the same setting, which diffusers' class has not."""
        super().save_folder(model, path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"causal_temporal_positioning": True}))

    def inputs(self, batch=2, latent=None, seed=1):
        x, timestep, tensors = super().inputs(batch, latent, seed)
        keyframes = _keyframes(*x.shape[-2:]).repeat(batch, 1, 1, 1)
        return x, timestep[:, None, None] * _times(x).flatten(2).transpose(1, 2), tensors | {"keyframes": keyframes}


def _times(x: torch.Tensor) -> torch.Tensor:
    """[1, 1, T, H, W]: ComfyUI's denoise mask."""
    times = torch.ones(1, 1, *x.shape[2:])
    times[:, :, 0], times[:, :, -KEYFRAMES:] = 0.0, 0.25
    times[:, :, -1, 0] = 0.5
    return times


def _conditioning(generator):
    extras = {"attention_mask": MASK[1:].long(), "frame_rate": FRAME_RATE}
    return torch.randn(1, 7, LTX["caption_channels"], generator=generator), extras


def _conditioning_with_keyframes(generator):
    text, extras = _conditioning(generator)
    latent = torch.empty(1, 128, 4, 3, 3)
    return text, extras | {"keyframe_idxs": _keyframes(3, 3), "denoise_mask": _times(latent).expand_as(latent)}


PLAIN = Case(
    name="ltx-video-0.9",
    family="ltx-video",
    config=LTX,
    latent=(128, 5, 4, 3),
    odd=(128, 5, 3, 5),
    tensors=_tensors,
    reference=_reference,
    convert=convert_ltx_transformer_checkpoint_to_diffusers,
    native=Native(LTX, _conditioning, (128, 4, 3, 3), detected={"caption_channels": LTX["caption_channels"]}),
)
CASES = (
    PLAIN,
    WithKeyframes(
        **vars(PLAIN)
        | {"name": "ltx-video-0.9.5", "reference": _reference_of_keyframes, "sampled": False}
        | {"native": replace(PLAIN.native, conditioning=_conditioning_with_keyframes)}
    ),
)
