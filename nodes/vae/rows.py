"""Which of ComfyUI's VAEs ranks have a class for, and what ComfyUI does before and after it."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import comfy.model_management
import torch
import torch.nn.functional as F

from parallel_backend.vaes import ltx

from .tiles import why_no_tiles

if TYPE_CHECKING:
    from comfy.ldm.cosmos.vae import CausalContinuousVideoTokenizer as CosmosVAE
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE as LTXVAE
    from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
    from comfy.ldm.models.autoencoder import AutoencodingEngine as HunyuanVAE

Change = Callable[[Any, torch.Tensor], torch.Tensor]
"""A VAE's model (an object of one of ComfyUI's classes), tensor -> tensor."""


def _same(_model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Known:
    """A row of KNOWN: the decoder or encoder (the part) of a class of VAEs of ComfyUI's. Functions get ComfyUI's model."""

    kind: str
    """Key in parallel_backend.vaes.VAES."""
    dims: int
    """Axes of a latent, batch and channels included."""
    channels: Callable[[Any], int]
    """Channels of a latent that the model decodes."""
    matches: Callable[[Any], bool] = lambda _model: True
    """Tells rows of the same classes apart."""
    before: Change = _same
    """What the model's `decode` (or `encode`) does with its input [1, C, ...] before the part runs."""
    drawn: Change = _same
    """The random noise that `decode` adds before that, drawn once for each latent."""
    after: Change = _same
    """What `encode` does with the part's output."""
    settings: Callable[[Any], dict[str, Any]] = lambda _model: {}
    """Settings for VAEClass.weights."""
    why_not: Callable[[Any], str | None] = lambda _model: None
    """Reason why a model of these classes cannot be cut all the same, in words that follow 'since'."""
    frames: Callable[[Any, int], bool] = lambda _model, _frames: True
    """Whether a video of so many frames of pixels is encoded as in ComfyUI."""
    counted: Callable[[int], int] = lambda frames: frames
    """Frames of the input -> frames for ComfyUI's estimate of memory. Ranks may run longer pieces than ComfyUI."""
    paddings: Collection[str] = ("zeros",)
    """Padding modes that the model's convolutions may have."""


def _kl_channels(model: "AutoencoderKL") -> int:
    """Channels of a latent. Flux.2's has each 2 x 2 patch of the decoder's input in its channels."""
    first = getattr(model, "post_quant_conv", model.decoder.conv_in)
    return first.weight.shape[1] * (4 if getattr(model, "bn", None) is not None else 1)


def _unpacked(model: "AutoencoderKL", latent: torch.Tensor) -> torch.Tensor:
    """The latent as the decoder's layers take it: Flux.2's [B, 4 C, H, W] -> [B, C, 2 H, 2 W]; others as they are."""
    bn = getattr(model, "bn", None)
    if bn is None:
        return latent
    mean, variance = (value.to(latent).view(1, -1, 1, 1) for value in (bn.running_mean, bn.running_var))
    return F.pixel_shuffle(latent * torch.sqrt(variance + model.bn_eps) + mean, 2)


def _packed(model: "AutoencoderKL", latent: torch.Tensor) -> torch.Tensor:
    """The inverse of `_unpacked`."""
    bn = getattr(model, "bn", None)
    if bn is None:
        return latent
    mean, variance = (value.to(latent) for value in (bn.running_mean, bn.running_var))
    return F.batch_norm(F.pixel_unshuffle(latent, 2), mean, variance, eps=model.bn_eps)


def _squashed(model: "AutoencodingEngine") -> str | None:
    return "a VAE whose decoder ends in tanh cannot be cut" if model.decoder.tanh_out else None


def _resamplers(model: "HunyuanVAE") -> tuple[list[Any], list[Any]]:
    """The encoder's downsampling layers and the decoder's upsampling layers, by level in the file's order."""
    down = [level.downsample for level in model.encoder.down if "downsample" in level._modules]
    return down, [level.upsample for level in model.decoder.up if "upsample" in level._modules]


def _hunyuan_settings(model: "HunyuanVAE") -> dict[str, Any]:
    down, up = _resamplers(model)
    strides = [layer.conv.conv.stride[0] for layer in down]
    scales = [layer.scale_factor[0] if isinstance(layer.scale_factor, tuple) else layer.scale_factor for layer in up]
    times = {"encoder": strides, "decoder": [int(scale) for scale in scales]}
    return {"times": times, "chunked": True}


def _shuffled_settings(model: "HunyuanVAE") -> dict[str, Any]:
    """Settings of HunyuanVideo 1.5 and of HunyuanImage 2.1's refiner."""
    down, up = _resamplers(model)
    factors = {"encoder": [[2 if layer.tds else 1, 2, 2] for layer in down]}
    factors["decoder"] = [[2 if layer.tus else 1, 2, 2] for layer in up]
    video = model.decoder.refiner_vae  # set for HunyuanVideo 1.5, in spite of its name
    return {"kind": "video" if video else "refiner", "factors": factors, "chunked": video}


def _image_settings(model: "HunyuanVAE") -> dict[str, Any]:
    down, up = _resamplers(model)
    return {"kind": "image", "factors": {"encoder": [[2, 2]] * len(down), "decoder": [[2, 2]] * len(up)}, "chunked": False}


_PADDINGS = ("zeros", "reflect", "replicate")


def _ltx_settings(model: "LTXVAE") -> dict[str, Any]:
    parts = {"encoder": model.encoder, "decoder": model.decoder}
    return {
        "blocks": {name: [list(block) for block in part.blocks_desc] for name, part in parts.items()},
        "padding_modes": {name: part.conv_in.conv.padding_mode for name, part in parts.items()},
        "patch_size": model.encoder.patch_size,
        "latent_channels": model.encoder.latent_channels,
        "latent_log_var": model.encoder.latent_log_var,
        "norm_layer": model.encoder.norm_layer,
        "causal_decoder": model.decoder.causal,
        "timed": model.timestep_conditioning,
        "timestep": model.decode_timestep,
    }


def _ltx_why_not(model: "LTXVAE") -> str | None:
    settings = _ltx_settings(model)
    for part, mode in settings["padding_modes"].items():
        layers = [module for module in getattr(model, part).modules() if isinstance(module, torch.nn.Conv3d)]
        if mode not in _PADDINGS or any(layer.padding_mode != mode for layer in layers if layer.kernel_size[-1] > 1):
            return "another node has changed this VAE's layers"
    return ltx.why_not(settings)


def _ltx_noise(model: "LTXVAE", latent: torch.Tensor) -> torch.Tensor:
    """The latent with a little noise for models with a timestep, drawn on the device on which ComfyUI draws it."""
    if not model.timestep_conditioning:
        return latent
    scale = model.decode_noise_scale
    noise = torch.randn_like(latent.to(comfy.model_management.vae_device())).to(latent)
    return noise * scale + (1.0 - scale) * latent


def _cosmos_statistics(model: "CosmosVAE", latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation, [1, C, frames, 1, 1] each. The model's frames are repeated for longer latents."""
    channels, frames = latent.shape[1:3]

    def by_frame(values: torch.Tensor) -> torch.Tensor:
        values = values.view(channels, -1)
        values = values.repeat(1, math.ceil(frames / values.shape[1]))[:, :frames]
        return values.to(latent).view(1, channels, frames, 1, 1)

    return by_frame(model.latent_mean), by_frame(model.latent_std)


def _cosmos_before(model: "CosmosVAE", latent: torch.Tensor) -> torch.Tensor:
    mean, deviation = _cosmos_statistics(model, latent)
    return latent / model.sigma_data * deviation + mean


def _cosmos_after(model: "CosmosVAE", latent: torch.Tensor) -> torch.Tensor:
    mean, deviation = _cosmos_statistics(model, latent)
    return (latent - mean) / deviation * model.sigma_data


def _hunyuan_channels(model: "HunyuanVAE") -> int:
    first = model.decoder.conv_in
    return getattr(first, "conv", first).weight.shape[1]


_KL = Known("AutoencoderKL", 4, _kl_channels, before=_unpacked, why_not=_squashed)
_KL_ENCODER = Known("AutoencoderKL", 4, _kl_channels, after=_packed)
_HUNYUAN = Known(
    "HunyuanVideo",
    5,
    _hunyuan_channels,
    settings=_hunyuan_settings,
    why_not=_squashed,
)
_HUNYUAN_IMAGE = Known("HunyuanImage 2.1", 4, _hunyuan_channels, settings=_image_settings)
_REFINER = Known(
    "HunyuanImage 2.1 refiner",
    5,
    _hunyuan_channels,
    lambda model: not model.decoder.refiner_vae,
    settings=_shuffled_settings,
    frames=lambda _model, frames: frames == 1 or frames % 4 == 0,
)
_HUNYUAN_15 = Known(
    "HunyuanVideo 1.5",
    5,
    _hunyuan_channels,
    lambda model: model.decoder.refiner_vae,
    settings=_shuffled_settings,
)
_LTX = Known(
    "LTX-Video",
    5,
    lambda model: model.decoder.conv_in.conv.in_channels,
    before=lambda model, latent: model.per_channel_statistics.un_normalize(latent),
    drawn=_ltx_noise,
    settings=_ltx_settings,
    why_not=_ltx_why_not,
    paddings=_PADDINGS,
)
_LTX_ENCODER = Known(
    "LTX-Video",
    5,
    _LTX.channels,
    after=lambda model, latent: model.per_channel_statistics.normalize(latent),
    settings=_ltx_settings,
    why_not=_ltx_why_not,
    paddings=_PADDINGS,
)
_COSMOS = Known("Cosmos", 5, lambda model: model.latent_channels, before=_cosmos_before)
_COSMOS_ENCODER = Known("Cosmos", 5, _COSMOS.channels, after=_cosmos_after, frames=lambda _model, frames: frames % 8 == 1)
# Ranks compute 4 frames of pixels at a time and keep as many from the piece before, for which ComfyUI's estimate for few
# frames is too low.
_WAN = Known("AutoencoderKLWan", 5, lambda model: model.z_dim, counted=lambda frames: max(5, frames) if frames > 1 else 1)
_H3 = Known("AutoencoderKLMiniMaxH3", 5, lambda model: model.post_quant_conv.weight.shape[1], why_not=why_no_tiles)

_KL_CLASS, _ENGINE = (f"comfy.ldm.models.autoencoder.{name}" for name in ("AutoencoderKL", "AutoencodingEngine"))
_LDM = "comfy.ldm.modules.diffusionmodules.model."
_COSMOS_CLASS = "comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer"
_COSMOS_LAYERS = "comfy.ldm.cosmos.cosmos_tokenizer.layers3d."
_LTX_LAYERS = "comfy.ldm.lightricks.vae.causal_video_autoencoder."
KNOWN: Mapping[tuple[str, str], tuple[Known, ...]] = {
    (_KL_CLASS, _LDM + "Decoder"): (_KL, _HUNYUAN),
    (_KL_CLASS, _LDM + "Encoder"): (_KL_ENCODER, _HUNYUAN),
    (_ENGINE, _LDM + "Decoder"): (_KL,),
    (_ENGINE, _LDM + "Encoder"): (_KL_ENCODER,),
    (_ENGINE, "comfy.ldm.hunyuan_video.vae.Decoder"): (_HUNYUAN_IMAGE,),
    (_ENGINE, "comfy.ldm.hunyuan_video.vae.Encoder"): (_HUNYUAN_IMAGE,),
    (_ENGINE, "comfy.ldm.hunyuan_video.vae_refiner.Decoder"): (_HUNYUAN_15, _REFINER),
    (_ENGINE, "comfy.ldm.hunyuan_video.vae_refiner.Encoder"): (_HUNYUAN_15, _REFINER),
    (_LTX_LAYERS + "VideoVAE", _LTX_LAYERS + "Decoder"): (_LTX,),
    (_LTX_LAYERS + "VideoVAE", _LTX_LAYERS + "Encoder"): (_LTX_ENCODER,),
    (_COSMOS_CLASS, _COSMOS_LAYERS + "DecoderFactorized"): (_COSMOS,),
    (_COSMOS_CLASS, _COSMOS_LAYERS + "EncoderFactorized"): (_COSMOS_ENCODER,),
    ("comfy.ldm.wan.vae.WanVAE", "comfy.ldm.wan.vae.Decoder3d"): (_WAN,),
    ("comfy.ldm.wan.vae.WanVAE", "comfy.ldm.wan.vae.Encoder3d"): (_WAN,),
    ("comfy.ldm.wan.vae2_2.WanVAE", "comfy.ldm.wan.vae2_2.Decoder3d"): (_WAN,),
    ("comfy.ldm.wan.vae2_2.WanVAE", "comfy.ldm.wan.vae2_2.Encoder3d"): (_WAN,),
    ("comfy.ldm.minimax.vae.MiniMaxH3VideoVAE", "comfy.ldm.minimax.vae.ViT3DDecoder"): (_H3,),
    ("comfy.ldm.minimax.vae.MiniMaxH3VideoVAE", "comfy.ldm.minimax.vae.EncoderFCN3D"): (_H3,),
}
"""(class of the model, class of its part) -> rows. A derived class does not match: it may compute another picture."""
