"""What stands in, in ComfyUI's process, for the files of a template that no machine of tests has. Run by templates.py.

Text encoders, VAEs, pictures and videos are replaced by objects that answer as theirs do, with values that follow from
what they are given: a prompt's text, a file's name, a picture. The diffusion model is a file of a test case, and so are
the shapes of its conditioning.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import comfy.clip_vision
import comfy.latent_formats
import comfy.nested_tensor
import comfy_api.latest
import torch
import torch.nn.functional as F
from small_models import prompts

import nodes

SIDE, FRAMES = 192, 17
"""Pixels of a picture's side, and pictures of a video: the largest that are computed."""
ENCODED = (
    "pooled_output",
    "attention_mask",
    "conditioning_llama3",
    "conditioning_byt5small",
    "unprocessed_ltxav_embeds",
    "image_slots",
    "t5xxl_ids",
    "t5xxl_weights",
)
"""Extras of a CONDITIONING that a text encoder makes. The others come from nodes of the template."""
AUDIO_RATE = 16000


def random(seed: str, *shape: int) -> torch.Tensor:
    """Values that this text decides."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(seed.encode())))


def picture(name: str, frames: int = 1) -> torch.Tensor:
    """[frames, SIDE, SIDE, 3] in 0..1: a smooth picture that moves a little."""
    coarse = random(name, frames, 3, 6, 6).mul(0.1) + random(name + "still", 1, 3, 6, 6)
    return torch.sigmoid(F.interpolate(coarse, (SIDE, SIDE), mode="bilinear")).movedim(1, -1)


def hole() -> torch.Tensor:
    """The mask of a picture whose middle is transparent."""
    mask = torch.zeros(1, SIDE, SIDE)
    mask[:, SIDE // 4 : -SIDE // 4, SIDE // 4 : -SIDE // 4] = 1
    return mask


@dataclass(frozen=True)
class Case:
    """A small model, whose prompts say what a template's are like."""

    name: str

    @cached_property
    def prompt(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """Text and extras of the positive prompt."""
        ((text, extras),) = prompts(self.name)[0]
        return text, extras

    def vision(self) -> torch.Tensor | None:
        """The hidden states of CLIP vision that its prompts have."""
        output = self.prompt[1].get("clip_vision_output")
        return None if output is None else next(iter(vars(output).values()))


class Tokens(dict):
    """A prompt's tokens for every text encoder that is asked for by its name."""

    def __missing__(self, _name: str) -> str:
        return self["text"]


class Clip:
    """A text encoder: its conditioning has the shapes of the case's."""

    def __init__(self, case: Case):
        self.case = case
        self.cond_stage_model = torch.nn.Module()
        self.patcher = self

    def clone(self, *_arguments: Any, **_named: Any) -> "Clip":
        return self

    def add_patches(self, *_arguments: Any, **_named: Any) -> list[str]:
        return []

    def clip_layer(self, _layer: int) -> None:
        """As it is."""

    def set_tokenizer_option(self, _name: str, _value: Any) -> None:
        """As it is."""

    def tokenize(self, text: str, **named: Any) -> dict[str, str]:
        pictures = [value for name, value in sorted(named.items()) if "image" in name and value is not None]
        return Tokens(text=f"{text} {len(pictures)}")

    def encode_from_tokens_scheduled(self, tokens: dict[str, str], add_dict: Any = None, **_named: Any) -> list:
        cond, extras = self._encode(tokens["text"])
        return [[cond, extras | (add_dict or {})]]

    def encode_from_tokens(self, tokens: dict[str, str], return_pooled: Any = False, return_dict: bool = False) -> Any:
        cond, extras = self._encode(tokens["text"])
        if return_dict:
            return {"cond": cond} | extras
        return (cond, extras.get("pooled_output")) if return_pooled else cond

    def _encode(self, text: str) -> tuple[torch.Tensor, dict[str, Any]]:
        def like(name: str, value: Any) -> Any:
            """Masks, and values that no text changes, stay as they are."""
            drawn = isinstance(value, torch.Tensor) and value.is_floating_point() and name != "attention_mask"
            return random(text + name, *value.shape) if drawn else value

        cond, known = self.case.prompt
        extras = {name: like(name, known[name]) for name in ENCODED if name in known}
        return like("text", cond), {"pooled_output": None} | extras


class Vae:
    """A VAE of a latent format: a latent is a picture's colours at the latent's size, mixed into its channels."""

    def __init__(self, latent_format: Any):
        self.latent_channels = latent_format.latent_channels
        self.latent_dim = latent_format.latent_dimensions
        self.groups = type(latent_format).__name__.startswith("MiniMaxH3")  # 5 + 17 k frames are 2 + 5 k latent ones
        if self.groups:
            self.latent_channels = 24
        self.space, self.time = latent_format.spacial_downscale_ratio, latent_format.temporal_downscale_ratio
        self.downscale_ratio = (lambda frames: self._frames(frames), self.space, self.space) if self.video else self.space
        self.upscale_ratio = (
            (lambda frames: 1 + (frames - 1) * self.time, self.space, self.space) if self.video else self.space
        )
        self.downscale_index_formula = self.upscale_index_formula = (self.time, self.space, self.space)
        self.output_channels, self.extra_1d_channel, self.not_video, self.audio_sample_rate = 3, None, False, AUDIO_RATE
        self.first_stage_model = self.patcher = self.device = None

    @property
    def video(self) -> bool:
        return self.latent_dim == 3

    def _frames(self, frames: int) -> int:
        """Latent ones of so many of pixels."""
        if self.groups and frames >= 5:
            return (frames - 5) // 17 * 5 + 2
        return max(0, math.ceil((frames - 1) / self.time)) + 1

    def throw_exception_if_invalid(self) -> None:
        """It is one."""

    def spacial_compression_encode(self) -> int:
        return self.space

    spacial_compression_decode = spacial_compression_encode

    def temporal_compression_encode(self) -> int | None:
        return self.time if self.video else None

    temporal_compression_decode = temporal_compression_encode

    def vae_encode_crop_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        if pixels.ndim == 5:
            pixels = pixels[0]
        colours = pixels[..., :3].movedim(-1, 1).float()
        height, width = (min(max(1, side // self.space), max(2, 2 * SIDE // self.space)) for side in colours.shape[-2:])
        small = F.interpolate(colours, (height, width), mode="area") - 0.5
        latent = torch.einsum("fchw,kc->fkhw", small, random("vae", self.latent_channels, 3))
        if not self.video:
            return latent
        places = torch.linspace(0, len(latent) - 1, self._frames(len(latent))).round().long()
        return latent[places].movedim(0, 1)[None]

    def encode_tiled(self, pixels: torch.Tensor, **_named: Any) -> torch.Tensor:
        return self.encode(pixels)

    def decode(self, latent: Any, **_named: Any) -> torch.Tensor:
        if latent.is_nested:
            latent = latent.unbind()[0]
        colours = torch.sigmoid(latent[:, :3].float().mean(1, keepdim=True).expand(-1, 3, *latent.shape[2:]))
        if not self.video:
            return F.interpolate(colours, scale_factor=self.space).movedim(1, -1)
        frames = 1 + (latent.shape[2] - 1) * self.time
        size = (frames, *(side * self.space for side in latent.shape[3:]))
        return F.interpolate(colours, size).movedim(1, -1)

    def decode_tiled(self, latent: Any, **_named: Any) -> torch.Tensor:
        return self.decode(latent)


class AudioVae(Vae):
    """LTX-2's or MiniMax's VAE of sounds: `frequencies` bins of so many channels, 25 latents a second.

    `time_last`: they are [B, channels, frequencies, latents], else the last two axes are the other way round.
    """

    def __init__(self, channels: int, frequencies: int, time_last: bool):
        super().__init__(comfy.latent_formats.LTXV())
        self.time_last = time_last
        self.latent_channels, self.latent_frequency_bins, self.output_sample_rate = channels, frequencies, AUDIO_RATE
        self.first_stage_model = self

    def num_of_latents_from_frames(self, frames: int, rate: float) -> int:
        return max(1, math.ceil(25 * frames / rate))

    def encode(self, waveform: torch.Tensor) -> torch.Tensor:
        latents = max(1, min(FRAMES, 25 * max(waveform.shape[1:]) // AUDIO_RATE))
        latent = random("sound", len(waveform), self.latent_channels, latents, self.latent_frequency_bins)
        return latent.mT.contiguous() if self.time_last else latent

    def decode(self, latent: Any, **_named: Any) -> torch.Tensor:
        return torch.zeros(1, AUDIO_RATE, 2)


class ClipVision:
    """CLIP vision: hidden states of the case's shape, of whatever it looks at. `pictures`: how many the case's are of."""

    def __init__(self, case: Case, pictures: int):
        batch, tokens, width = (1, 257, 1280) if (known := case.vision()) is None else known.shape
        self.shape = (batch, tokens // pictures, width)

    def encode_image(self, image: torch.Tensor, **_named: Any) -> comfy.clip_vision.Output:
        output = comfy.clip_vision.Output()
        seen = f"{float(image.mean()):.4f}"
        output["last_hidden_state"] = output["penultimate_hidden_states"] = random(seen, *self.shape)
        output["image_embeds"] = random(seen, 1, 1024)
        output["mm_projected"] = None
        return output


class AudioEncoder:
    """wav2vec2 or Whisper: hidden states of every layer, 50 a second."""

    def encode_audio(self, waveform: torch.Tensor, rate: int) -> dict[str, Any]:
        states = [random(f"sound {layer}", 1, 50, 1024) for layer in range(25)]
        return {"encoded_audio": states[-1], "encoded_audio_all_layers": states, "audio_samples": AUDIO_RATE}


def video(name: str) -> Any:
    """A VIDEO."""
    components = comfy_api.latest.Types.VideoComponents(
        images=picture(name, FRAMES), audio=sound(name), frame_rate=comfy_api.latest._input_impl.video_types.Fraction(24)
    )
    return comfy_api.latest.InputImpl.VideoFromComponents(components)


def sound(name: str) -> dict[str, Any]:
    """An AUDIO of a second."""
    return {"waveform": 0.1 * random(name, 1, 2, AUDIO_RATE), "sample_rate": AUDIO_RATE}


def found_in(image: torch.Tensor) -> torch.Tensor:
    """What a detector finds in pictures [B, H, W, 3]: a mask [B, H, W] of their middle, 1 inside."""
    masks = torch.zeros(image.shape[:3])
    height, width = image.shape[1:3]
    masks[:, height // 4 : 3 * height // 4, width // 4 : 3 * width // 4] = 1.0
    return masks


def tracked(images: torch.Tensor, **_inputs: Any) -> tuple[dict[str, Any]]:
    """A SAM3_TRACK_DATA of one object."""
    from comfy.ldm.sam3.tracker import pack_masks

    masks = found_in(images)
    packed = pack_masks(masks[:, None] > 0)
    return ({"packed_masks": packed, "orig_size": tuple(images.shape[1:3]), "n_frames": len(images), "scores": [1.0]},)


def upsampled(samples: dict[str, Any], **_named: Any) -> tuple[dict[str, Any]]:
    """A latent of twice the height and width."""
    latent = samples["samples"]
    return ({**samples, "samples": F.interpolate(latent, (latent.shape[2], *(2 * side for side in latent.shape[3:])))},)


def warped_noise(width: int, height: int, length: int, **_inputs: Any) -> tuple[dict[str, Any]]:
    """A latent of CogVideoX 1.5, which has an even number of frames."""
    frames = (math.ceil((length - 1) / 4) + 1) // 2 * 2
    return ({"samples": random("warped", 1, 16, frames, height // 8, width // 8)},)


def replace(name: str, run: Callable[..., tuple]) -> None:
    """This function, with the node's inputs by name, in place of a node of ComfyUI."""
    if (kind := nodes.NODE_CLASS_MAPPINGS.get(name)) is None:
        return  # ComfyUI 0.33 has no Conditioning Loader
    members = {
        "INPUT_TYPES": kind.INPUT_TYPES,
        "RETURN_TYPES": tuple(kind.RETURN_TYPES),
        "FUNCTION": "run",
        "CATEGORY": "",
        "run": lambda _self, **inputs: run(**inputs),
    }
    nodes.NODE_CLASS_MAPPINGS[name] = type(name, (), members)


def install(case: Case, latent_format: Any) -> Vae:
    """Stand-ins for every file but diffusion models and LoRAs; the VAE. `case`: whose prompts the text encoders make."""
    vae = Vae(latent_format)
    ltx = isinstance(latent_format, comfy.latent_formats.LTXV)
    audio = AudioVae(8, 16, time_last=False) if ltx else AudioVae(32, 2, time_last=True)
    for name in ("CLIPLoader", "DualCLIPLoader", "TripleCLIPLoader", "QuadrupleCLIPLoader", "LTXAVTextEncoderLoader"):
        replace(name, lambda **_inputs: (Clip(case),))
    replace("VAELoader", lambda vae_name: (audio if "audio" in vae_name else vae,))
    replace("LTXVAudioVAELoader", lambda **_inputs: (audio,))
    replace("AudioEncoderLoader", lambda **_inputs: (AudioEncoder(),))
    replace("CLIPVisionLoader", lambda **_inputs: (ClipVision(case, 2 if case.name.endswith("flf2v") else 1),))
    replace("LoadImage", lambda image, **_inputs: (picture(str(image)), hole()))
    replace("LoadVideo", lambda file, **_inputs: (video(file),))
    replace("LoadAudio", lambda audio, **_inputs: (sound(audio),))
    replace("LatentUpscaleModelLoader", lambda **_inputs: (None,))
    replace("LTXVLatentUpsampler", upsampled)
    replace("SAM3_Detect", lambda image, **_inputs: (found_in(image), []))
    replace("SAM3_VideoTrack", tracked)
    replace(
        "ConditioningLoader",
        lambda conditioning_name: (Clip(case).encode_from_tokens_scheduled({"text": conditioning_name}),),
    )
    replace("LoadMoGeModel", lambda **_inputs: (None,))
    replace("MoGeInference", lambda image, **_inputs: (image,))
    replace("OpticalFlowLoader", lambda **_inputs: (None,))
    replace("VOIDWarpedNoise", warped_noise)
    replace("MoGeRender", lambda moge_geometry, **_inputs: (moge_geometry,))
    replace("RTDETR_detect", lambda **_inputs: ([],))
    replace("SDPoseKeypointExtractor", lambda image, **_inputs: (image,))
    replace("SDPoseDrawKeypoints", lambda keypoints, **_inputs: (keypoints,))
    replace("UpscaleModelLoader", lambda **_inputs: (None,))
    replace("ImageUpscaleWithModel", lambda image, **_inputs: (image,))
    replace("Video Slice", lambda video, **_inputs: (video,))
    replace("FluxKontextImageScale", lambda image: (image,))
    for name in ("TextGenerate", "TextGenerateLTX2Prompt"):
        replace(name, lambda prompt="", **_inputs: (prompt,))
    return vae
