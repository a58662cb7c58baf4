"""LTX-2's inputs: conditioning tensors from ComfyUI's model call, and the class's arguments on a rank.

The sound's tokens are those of the companion latent, then those of a reference voice, which are an input only.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from parallel_backend.core.device_copies import to_device
from parallel_backend.core.spans import Span

from ..base.patching import Companion, Patching
from ..base.step_inputs import Config, StepInputs
from .conditioning import text

PIXELS = (8, 32, 32)
"""Frames, rows and columns of pixels that a video token stands for."""
FRAME_RATE = 25.0
"""Frames per second, as in ComfyUI, if the conditioning names none."""
TIME = 1000.0
"""Factor between ComfyUI's sigma and the model's timestep."""
SOUND = (4, 160, 16000)
"""Spectrogram columns of a sound token, samples between two columns, samples per second."""
STG, TO_VIDEO, TO_SOUND = OPTIONS = ("stg_self_attn_blocks", "a2v_cross_attn", "v2a_cross_attn")
"""Entries of ComfyUI's transformer_options: blocks that leave self-attention out (LTXV Spatio-Temporal Guidance), and
whether video attends to sound and sound to video (LTXV Modality Guidance)."""
ACCEPTS = ("frame_rate", "keyframe_idxs", "guide_attention_entries", "denoise_mask", "audio_denoise_mask", "ref_audio")
VECTORS = (
    *("context", "sound_context", "seconds", "keyframes", "guide_weights", "left_out"),
    *("perturbed", "apart_video", "apart_sound"),
)
EXACT = ("seconds", "keyframes", "guide_weights", "left_out")
UNSEEN = -30000.0
"""Added to the scores of a key that is left out. Finite in fp16 too, so that a row without other keys gives numbers."""


@dataclass(frozen=True)
class Patchifier:
    """Stand-in for an attribute of ComfyUI's native models, with which BaseModel makes a time for each token."""

    patching: Patching | Companion

    def patchify(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Tokens [B, N, C] of a latent, a video's in the order of frames, rows, columns."""
        frames_first = self.patching.cut("frames") if isinstance(self.patching, Patching) else self.patching
        return frames_first.pack(latent), None


class Times(NamedTuple):
    """Times of a stream's tokens, which may differ, as a time embedding takes them: float32."""

    distinct: torch.Tensor
    """[u]: the distinct times of all tokens of the stream."""
    rows: torch.Tensor | None
    """[b, n]: index in `distinct` of each of the rank's tokens. None: there is one time."""
    latest: torch.Tensor
    """[b]: the latest time of the stream's tokens."""


def conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Conditioning tensors of a call: `context` [B, T, C], `sound_context` [B, T, C'], `seconds` [B] per frame.

    With guides: `keyframes` [B, 3, K, 2], pixel bounds of the last K tokens, and where they differ from the usual
    `guide_weights` [B, K], logarithms, and `left_out` [B, K] bool. With a reference voice: `voice` [B, R, c]. With guidance
    by blocks: `perturbed` [B, blocks] bool. `apart_video`, `apart_sound` [B, 1]: that stream does not attend to the other.
    ValueError for text that has not been through the model's connectors, and for guides that do not fit the latent.
    """
    widths = text_widths(config)
    context = text("LTX-2", sum(widths), call)
    batch = len(context)
    tensors = dict(zip(("context", "sound_context"), context.split(widths, dim=-1), strict=True))
    tensors["seconds"] = torch.full((batch,), 1.0 / call.get("frame_rate", FRAME_RATE))
    if (keyframes := call.get("keyframe_idxs")) is not None and keyframes.shape[2]:
        tensors["keyframes"] = keyframes
        tensors |= _guides(keyframes.shape[2], batch, call)
    if (voice := call.get("ref_audio")) is not None:
        tensors["voice"] = voice["tokens"].to(context).expand(batch, -1, -1)
    if blocks := call.get(STG):
        tensors["perturbed"] = torch.tensor([[index in blocks for index in range(config["num_layers"])]] * batch)
    apart = {"apart_video": TO_VIDEO, "apart_sound": TO_SOUND}
    return tensors | {name: torch.ones(batch, 1) for name, option in apart.items() if not call.get(option, True)}


def text_widths(config: Config) -> tuple[int, int]:
    """Channels of the connectors' output for the video and for the sound."""
    if config["use_prompt_embeddings"]:
        return config["caption_channels"], config["caption_channels"]
    return config["cross_attention_dim"], config["audio_cross_attention_dim"]


def _guides(tokens: int, batch: int, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`guide_weights` and `left_out` of `conditioning`, if a guide has them. Tokens with a mask below zero are left out.

    ValueError for guides of another size than the latent, and for a latent without their mask.
    """
    if call.get("denoise_mask") is None:
        raise ValueError(
            "latent_image: the conditioning has guides, and this latent is without the mask that belongs to them. Use the "
            "latent that LTXVAddGuide gives."
        )
    if tokens % math.prod(call["grid"][1:]) or tokens > math.prod(call["grid"]):
        raise ValueError(
            f"positive, negative: the guides have {tokens} tokens, which is no whole number of frames of this latent_image. "
            "They are of another size: crop them with LTXVCropGuides before the latent is made larger, and add them anew."
        )
    mask = call["denoise_mask"].expand(batch, -1, *call["denoise_mask"].shape[2:])
    left_out = (mask < 0).any(1).flatten(1)[:, -tokens:].cpu()
    weights, start = torch.ones(tokens), 0
    for guide in call.get("guide_attention_entries") or ():
        guide_tokens = slice(start, start + guide["pre_filter_count"])
        kept = (~left_out[0, guide_tokens]).nonzero()[:, 0] + start
        seen = (
            torch.ones(len(kept)) if guide["pixel_mask"] is None else _of_tokens(guide["pixel_mask"], guide["latent_shape"])
        )
        count = min(len(seen), len(kept))
        weights[kept[:count]] = seen[:count] * guide["strength"]
        start = guide_tokens.stop
    tensors = {"guide_weights": weights.log().clamp(min=UNSEEN).expand(batch, -1)} if (weights != 1).any() else {}
    return tensors | ({"left_out": left_out} if left_out.any() else {})


def _of_tokens(mask: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    """A guide's mask [1, 1, F, H, W] of pixels -> weights [f h w] of its tokens, `shape` = f, h, w (comfy/ldm/lightricks).

    Frame 0 of the latent is one frame of the mask; the others share the mask's remaining frames evenly.
    """
    frames, height, width = shape
    rows = F.interpolate(mask[0].float().transpose(0, 1).cpu(), size=(height, width), mode="area")[:, 0]
    rest = rows[1:]
    if frames == 1:
        rest = rest[:0]
    elif not len(rest):
        rest = rows[:1].expand(frames - 1, -1, -1)
    elif len(rest) >= frames - 1:
        each = len(rest) // (frames - 1)
        rest = rest[: each * (frames - 1)].unflatten(0, (-1, each)).mean(1)
    else:
        rest = rest[torch.arange(frames - 1) * len(rest) // (frames - 1)]
    return torch.cat((rows[:1], rest)).flatten()


def arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    """Arguments of LTX2VideoTransformer3DModel.forward."""
    tensors, batch = step.tensors, len(step.timestep)
    x, sound, voice = step.x, step.x_companion, tensors.get("voice")
    if x is None or sound is None:  # only the number of tokens counts
        x, sound = (step.timestep.new_zeros(1, 1, 1).expand(batch, len(span), 1) for span in (step.image, step.text))
    else:
        sound = sound[..., : config["audio_in_channels"]]
        sound = sound if voice is None else torch.cat((sound, voice), dim=1)
    times, sound_times = _times(step)
    places = step.of_tokens("places", step.places_in_class)
    seen = None
    if "left_out" in tensors:
        left_out = F.pad(tensors["left_out"], (step.token_order.image - tensors["left_out"].shape[1], 0))
        seen = ~left_out[:, places, None]
    return {
        "hidden_states": x,
        "audio_hidden_states": sound,
        "encoder_hidden_states": tensors["context"],
        "audio_encoder_hidden_states": tensors["sound_context"],
        "times": times,
        "audio_times": sound_times,
        "video_coords": _video_places(step, places),
        "audio_coords": _sound_places(step),
        "marked": _marked(step) if config["use_keyframes_abs_pos_embedding"] else None,
        "guide_weights": _guide_weights(step, places),
        "seen": seen,
        "voice_tokens": len(step.text_span),
        "audio_to_video": step.companion_tokens > 0 and "apart_video" not in tensors,
        "video_to_audio": step.companion_tokens > 0 and "apart_sound" not in tensors,
        "perturbed": _perturbed(step),
    }


def _times(step: StepInputs) -> tuple[Times, Times]:
    """Times of the video's and of the sound's tokens. A reference voice has time 0.

    Distinct times are counted on the host, since their number is a tensor's size, for which the device would be waited for.
    They are those of all tokens, so that every band embeds the same times and shares the cached embedding.
    """
    whole, sound = step.on_host.float() * TIME, step.companion_tokens
    whole = whole.reshape(len(whole), -1).clamp(min=0)  # tokens that are left out have times below zero
    both = whole, whole
    if sound and whole.shape[1] > 1:
        both = whole.split((1, 1) if whole.shape[1] == 2 else (whole.shape[1] - sound, sound), dim=1)
    voice = step.text_tokens - sound
    of_sound = both[1]
    if voice:
        of_sound = torch.cat((of_sound.expand(-1, max(sound, 1)), whole.new_zeros(len(whole), voice)), dim=1)
    device = step.timestep.device
    return _stream(both[0], step.places_in_class(step.image), device), _stream(of_sound, _numbers(step.text), device)


def _stream(times: torch.Tensor, places: torch.Tensor, device: torch.device) -> Times:
    """[b, k] times of all tokens, k = 1 if they are the same -> the times of the tokens with the numbers `places`."""
    distinct, index = times.unique(return_inverse=True)
    rows = None
    if len(distinct) > 1:
        rows = to_device(index[:, places] if index.shape[1] > 1 else index.expand(-1, len(places)), device)
    return Times(to_device(distinct, device), rows, to_device(times.amax(1), device))


def _numbers(span: Span) -> torch.Tensor:
    return torch.arange(span.start, span.stop)


def _video_places(step: StepInputs, places: torch.Tensor) -> torch.Tensor:
    """[b, 3, n] float32: the middle of each of the rank's tokens, in seconds, pixel rows and pixel columns."""

    def edges(image: Span) -> torch.Tensor:
        start = torch.stack(torch.unravel_index(step.places_in_class(image), step.grid))
        pixels = torch.stack((start, start + 1), dim=-1) * torch.tensor(PIXELS)[:, None, None]
        pixels[0] = (pixels[0] + 1 - PIXELS[0]).clamp(min=0)  # the first latent frame stands for one frame, others for 8
        return pixels.float()

    pixels = step.of_tokens("pixels", edges).repeat(len(step.timestep), 1, 1, 1)
    if (keyframes := step.tensors.get("keyframes")) is not None:
        rows = _guide_rows(step)
        pixels[:, :, rows] = keyframes[:, :, places[rows] - _first_guide(step)].float()
    pixels[:, 0] *= step.tensors["seconds"][:, None, None]
    return (pixels[..., 0] + pixels[..., 1]) / 2


def _first_guide(step: StepInputs) -> int:
    """Number of the first token of a guide."""
    keyframes = step.tensors.get("keyframes")
    return step.token_order.image - (0 if keyframes is None else keyframes.shape[2])


def _guide_rows(step: StepInputs) -> torch.Tensor:
    """Indices of those of the rank's tokens that are a guide's."""
    first = _first_guide(step)
    return step.of_tokens("guide rows", lambda image: (step.places_in_class(image) >= first).nonzero()[:, 0])


def _marked(step: StepInputs) -> torch.Tensor:
    """[n, 1] bool: tokens of the video's first frame. A guide's are none of them."""
    first = min(_first_guide(step), step.grid[1] * step.grid[2])
    return step.of_tokens("first frame", lambda image: step.places_in_class(image)[:, None] < first)


def _sound_places(step: StepInputs) -> torch.Tensor:
    """[b, 1, a] float32: middles of the rank's sound tokens in seconds. A reference voice ends before the sound."""
    column, hop, rate = SOUND

    def seconds(number: torch.Tensor) -> torch.Tensor:
        return (number.float() * column + 1 - column).clip(min=0) * hop / rate

    def edges(number: torch.Tensor) -> torch.Tensor:
        return torch.stack((seconds(number), seconds(number + 1)))

    def middles(_image: Span) -> torch.Tensor:
        voice = step.text_tokens - step.companion_tokens
        before = edges(_numbers(step.text_span)) - (float(seconds(torch.tensor(voice))) + column * hop / rate)
        return torch.cat((edges(_numbers(step.companion)), before), dim=1).sum(0) / 2

    return step.of_tokens("sound", middles).expand(len(step.timestep), 1, -1)


def _guide_weights(step: StepInputs, places: torch.Tensor) -> torch.Tensor | None:
    """[b, n, 2]: logarithm of the weight of a guide's token, and 1 for a guide's tokens, 0 for others."""
    if "guide_weights" not in step.tensors:
        return None
    weights = step.tensors["guide_weights"]
    both = torch.stack((weights, torch.ones_like(weights)), dim=-1)
    return F.pad(both, (0, 0, _first_guide(step), 0))[:, places]


def _perturbed(step: StepInputs) -> frozenset[int]:
    """Numbers of blocks that leave self-attention out. Read from the device once for a conditioning."""
    if "perturbed" not in step.tensors:
        return frozenset()
    if "perturbed" not in step.kept:
        step.kept["perturbed"] = step.tensors["perturbed"][0].nonzero()[:, 0].cpu()
    return frozenset(step.kept["perturbed"].tolist())
