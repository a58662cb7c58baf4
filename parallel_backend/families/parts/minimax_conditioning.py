"""MiniMax H3 in ComfyUI's process: conditioning tensors from a call's payload, and sound in the samplers' form.

ComfyUI's BaseModel passes one payload with keyframes, references and tags that mark text tokens of pictures.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ..base.family import Finish
from ..base.patching import Latents
from ..base.step_inputs import REFERENCE_POSITIONS, REFERENCES, Config
from .conditioning import text
from .minimax_layout import CHANNELS, SOUND_TIME, VISUAL_TIME, References, place_references

SHIFTS = {"minimax_h3_sigma_shift_video": 12.0, "minimax_h3_sigma_shift_audio": 3.0}
"""Entries of ComfyUI's transformer_options -> usual values: shifts of the noise schedules of video and sound."""
KINDS = 3
"""Kinds of tokens, each with its modulation: video 0, text 1, sound 2. Text tokens of pictures count as video."""
STEPS = 1000.0
"""The sampler's timestep of pure noise."""
VECTORS = ("shifts", "begins", "levels", "reference_sound", "text_kinds", "video_levels", "sound_levels")
"""`Inputs.vector_tensors`."""


def conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context` [B, T, text_dim], references, and tensors for the tokens' positions and times (parts/minimax_tokens.py)."""
    context, payload = text("MiniMax H3", config["text_dim"], call), call.get("minimax_payload") or {}
    clean_video, clean_sound = (
        float(payload.get(name, usual))
        for name, usual in (("visual_cond_noise_aug", VISUAL_TIME), ("audio_cond_noise_aug", SOUND_TIME))
    )
    grid = call.get("grid", (1, 1, 1))
    references = References(4 * config["in_channels"], clean_video, clean_sound, int(payload.get("seed", 0)))
    begins = place_references(payload, context.shape[1], grid, references)
    # Each level is (0: video or 1: sound, share of the noise, largest time): see minimax_tokens.times.
    levels = [(0, 1.0, VISUAL_TIME), (1, 1.0, SOUND_TIME), (0, 0.0, clean_video), (1, 0.0, clean_sound)]
    tensors = {"shifts": torch.tensor([call.get(name, usual) for name, usual in SHIFTS.items()])}
    tensors["begins"] = torch.tensor([begins])
    if references.tokens:
        tensors[REFERENCES], tensors[REFERENCE_POSITIONS] = torch.cat(references.tokens), torch.cat(references.places)
        tensors["reference_sound"] = torch.cat(references.sound)
    if (tags := payload.get("text_token_tags")) is not None:
        tensors["text_kinds"] = _kinds(tags.flatten().long(), context.shape[1])
    for name, mask, stream, limit in (
        ("video_levels", _video_mask(call.get("denoise_mask")), 0, VISUAL_TIME),
        ("sound_levels", _sound_mask(call.get("audio_denoise_mask")), 1, SOUND_TIME),
    ):
        if mask is not None:
            shares, place = mask.unique(return_inverse=True)
            tensors[name] = place + len(levels)
            levels += [(stream, share, limit) for share in shares.tolist()]
    tensors["levels"] = torch.tensor(levels)
    return {"context": context} | {name: value.expand(len(context), *value.shape) for name, value in tensors.items()}


def videos(call: Mapping[str, Any]) -> list[torch.Tensor]:
    """Latents of keyframes and references in the payload, without sound."""
    payload = call.get("minimax_payload") or {}
    references = [block["latent"] for block in payload.get("refs") or () if block["kind"] != "audio"]
    frames = (frame.get("latent") for frame in payload.get("keyframes") or ())
    return references + [latent for latent in frames if latent is not None]


def reference_runs(payload: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """(first, end) of each keyframe, reference picture, video and sound among the tokens of `place_references`, in the order
    of ComfyUI's sequence, in which keyframes come first."""

    def sound(latent: torch.Tensor) -> int:
        return CHANNELS * latent.shape[-1]

    def video(latent: torch.Tensor) -> int:
        return latent.shape[2] * (latent.shape[3] // 2) * (latent.shape[4] // 2)

    references: list[int] = []
    for block in payload.get("refs") or ():
        if block["kind"] != "image" and block["ref_audio_t"]:
            references.append(sound(block["audio_latent"]))
        if block["kind"] != "audio":
            references.append(video(block["latent"]))
    keyframes: list[int] = []
    for frame in payload.get("keyframes") or ():
        keyframes += [video(latent)] if (latent := frame.get("latent")) is not None else []
        keyframes += [sound(latent)] if (latent := frame.get("audio_latent")) is not None else []
    ends = list(itertools.accumulate((*references, *keyframes), initial=0))
    runs = list(itertools.pairwise(ends))
    return *runs[len(references) :], *runs[: len(references)]


def _kinds(tags: torch.Tensor, words: int) -> torch.Tensor:
    """Kinds [T] of the text's tokens. ValueError for tags that do not fit the text."""
    if len(tags) != words or not bool(((tags >= 0) & (tags < KINDS)).all()):
        raise ValueError(
            f"positive, negative: the text has {words} tokens, and the {len(tags)} tags with it are not for them. Encode it "
            "with MiniMax H3's own text encoder, and do not concatenate conditionings."
        )
    return tags


def _video_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Mask [1, C, T, H, W] -> largest value in each token, by frame, row and column. None if everything is generated."""
    if mask is None:
        return None
    values = mask[0, 0].float().cpu()
    values = F.pad(values, (0, -values.shape[-1] % 2, 0, -values.shape[-2] % 2), mode="replicate")
    return _unless_ones(F.max_pool2d(values, 2).flatten())


def _sound_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else _unless_ones(mask[0, 0].float().cpu().flatten())


def _unless_ones(values: torch.Tensor) -> torch.Tensor | None:
    return None if bool((values >= 1.0 - 1e-3).all()) else values


def shifted(sigma: torch.Tensor, shift: Any, to: Any) -> torch.Tensor:
    """Sigma of a schedule with one shift -> sigma at the same step of the schedule with the shift `to`."""
    base = sigma / (shift + sigma * (1.0 - shift))
    return to * base / (1.0 + (to - 1.0) * base)


def sigma_of(timestep: torch.Tensor) -> torch.Tensor:
    """The video's sigma, the same for all batch entries of a call."""
    return (timestep.flatten()[0] / STEPS).float().clamp(min=1e-6)


def carried(latents: Latents, timestep: torch.Tensor, call: dict[str, Any]) -> tuple[Latents, Finish]:
    """`Inputs.carried`. ComfyUI's samplers carry the sound on the video's schedule, scaled up (ModelSamplingAV)."""
    scale = float((call.get("minimax_payload") or {}).get("audio_scale", 1.0))
    if scale == 1.0:
        return latents, lambda outputs: outputs
    video_shift, sound_shift = (float(call.get(name, usual)) for name, usual in SHIFTS.items())
    sigma = sigma_of(timestep)
    sound_sigma = shifted(sigma, video_shift, sound_shift)
    sound = latents[1] * (sound_sigma / sigma).to(latents[1].dtype)

    def finish(outputs: Latents) -> Latents:
        velocity = (1.0 + (scale - 1.0) * sound_sigma).to(outputs[1].dtype) * outputs[1]
        return outputs[0], (1.0 - scale) * sound + velocity

    return (latents[0], sound), finish
