"""Parallel VAE Decode: ComfyUI's VAE, its decoder on the ranks in bands of rows."""

import logging

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
import torch.nn.functional as F
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
from comfy.ldm.modules.diffusionmodules.model import Decoder

from parallel_backend.checkpoints.vae_keys import to_diffusers
from parallel_backend.client.registry import registry
from parallel_backend.client.vae import RemoteDecoder, TooLittleMemory
from parallel_backend.core.devices import device_kind
from parallel_backend.core.spans import Span, split
from parallel_backend.processes.pool import Pool

from .model.room import comfyui_gpus
from .ui.devices import gpus, is_auto, named_devices
from .ui.host import check_cancelled
from .ui.input_checks import validate
from .ui.node_text import say
from .ui.widgets import CATEGORY

log = logging.getLogger(__name__)


@validate()
class ParallelVAEDecode:
    CATEGORY = CATEGORY
    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "decode"
    DESCRIPTION = (
        "VAE Decode on several GPUs: each decodes a band of the picture, the result is that of one GPU. Image VAEs; others "
        "are decoded whole by ComfyUI, and the node says so."
    )

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "samples": ("LATENT", {"tooltip": "The latent to decode."}),
                "vae": ("VAE", {"tooltip": "The model's VAE, from Load VAE or a checkpoint loader."}),
            },
            "optional": {
                "devices": (
                    "STRING",
                    {
                        "default": "auto",
                        "tooltip": "auto (those of the loaded model, or all GPUs), or a list such as cuda:0,cuda:1. Other "
                        "devices than the loaded model's end its processes.",
                    },
                ),
            },
        }

    def decode(self, samples, vae, devices="auto"):
        if not all(hasattr(vae, name) for name in ("decode", "latent_dim", "first_stage_model")):
            raise ValueError("vae: this is no VAE. Connect Load VAE, or a checkpoint loader's.")
        latent = samples["samples"]
        if latent.is_nested:
            latent = latent.unbind()[0]
        if vae.latent_dim == 2 and latent.ndim == 5:
            latent = latent[:, :, 0]
        reason = why_not_cut(vae, latent)
        if reason is None:
            pool = find_ranks(devices)
            if pool is None or len(pool.devices) == 1:
                reason = "there is only one device for it"
            elif latent.shape[2] < len(pool.devices):
                reason = f"the latent has {latent.shape[2]} rows, too few for {len(pool.devices)} ranks"
            else:
                try:
                    images = decode_in_bands(vae, latent, pool)
                    say(f"Decoded in {len(pool.devices)} bands on {', '.join(pool.devices)}.")
                    return (images,)
                except TooLittleMemory as short:
                    reason = str(short)
        log.info("Parallel VAE Decode: decoding whole in ComfyUI, since %s", reason)
        say(f"Decoded whole by ComfyUI, since {reason}.")
        images = vae.decode(latent)
        return (images.reshape(-1, *images.shape[-3:]) if images.ndim == 5 else images,)


def find_ranks(devices: str) -> Pool | None:
    """Ranks on the named devices, started if they do not run. None: `auto` finds a single device."""
    if not is_auto(devices):
        return registry().pool_for(named_devices(devices), check_cancelled)
    running, all_gpus = registry().pool_for(None, check_cancelled), gpus()
    return running if running is not None or len(all_gpus) < 2 else registry().pool_for(all_gpus, check_cancelled)


def why_not_cut(vae: comfy.sd.VAE, latent: torch.Tensor) -> str | None:
    """Reason why this VAE cannot be cut, in words that follow 'since'. None: it can.

    What can is AutoencoderKL's decoder as ComfyUI has it: with anything else the picture would be wrong. ValueError for a
    latent of another model.
    """
    vae.throw_exception_if_invalid()
    model = vae.first_stage_model
    decoder = getattr(model, "decoder", None)
    kind = f"a VAE of this kind ({type(model).__name__}) cannot be cut"
    if type(model) not in (AutoencoderKL, AutoencodingEngine) or type(decoder) is not Decoder or latent.ndim != 4:
        return kind
    if decoder.tanh_out or to_diffusers(vae.get_sd()) is None:
        return kind
    if vae.patcher.patches or type(vae) is not comfy.sd.VAE or "decode" in vars(vae) or "decode" in vars(model):
        return "another node has changed this VAE"
    if any(changed(module) for module in (model, *decoder.modules())):
        return "another node has changed this VAE's layers"
    needed = latent_channels(model)
    if latent.shape[1] != needed:
        raise ValueError(
            f"samples: the latent has {latent.shape[1]} channels, this VAE needs {needed}. Use the VAE that belongs to the "
            "latent's model."
        )
    return None


def changed(module: torch.nn.Module) -> bool:
    """The module is not as its class has it: nodes for tiling, seamless textures and the like change modules."""
    own = vars(module)
    hooked = module._forward_hooks or module._forward_pre_hooks
    return "forward" in own or "_conv_forward" in own or bool(hooked) or own.get("padding_mode", "zeros") != "zeros"


def latent_channels(model: AutoencodingEngine) -> int:
    """Channels of a latent that this VAE decodes. Flux.2's has each 2 x 2 of its latent in the channels."""
    first = getattr(model, "post_quant_conv", model.decoder.conv_in)
    return first.weight.shape[1] * (4 if getattr(model, "bn", None) is not None else 1)


def unpacked(model: AutoencodingEngine, latent: torch.Tensor) -> torch.Tensor:
    """The latent as the decoder's layers take it: Flux.2's [B, 4 C, H, W] -> [B, C, 2 H, 2 W]; others as they are."""
    bn = getattr(model, "bn", None)
    if bn is None:
        return latent
    mean, variance = (value.to(latent).view(1, -1, 1, 1) for value in (bn.running_mean, bn.running_var))
    return F.pixel_shuffle(latent * torch.sqrt(variance + model.bn_eps) + mean, 2)


def decode_in_bands(vae: comfy.sd.VAE, latent: torch.Tensor, pool: Pool) -> torch.Tensor:
    """[B, C, H, W] -> [B, 8 H, 8 W, 3] as vae.decode gives it, one batch entry after the other."""
    model = vae.first_stage_model
    on_gpus = all(device_kind(device) == "cuda" for device in pool.devices)
    dtype = vae.vae_dtype if on_gpus else torch.float32
    # Older versions of ComfyUI have float32 always.
    out_dtype = vae.vae_output_dtype() if hasattr(vae, "vae_output_dtype") else torch.float32

    def weights() -> dict[str, torch.Tensor]:
        return {name: tensor.to("cpu", dtype) for name, tensor in to_diffusers(vae.get_sd()).items()}

    decoder = RemoteDecoder(pool, f"{vae.patcher.patches_uuid} {id(model)} {dtype}", weights)
    largest = split(Span(0, latent.shape[2]), len(pool.devices))[0]
    needed = int(vae.memory_used_decode((1, latent.shape[1], len(largest), latent.shape[3]), dtype))
    for device in comfyui_gpus():
        if str(device) in pool.devices:
            comfy.model_management.free_memory(needed, device)
    images, progress = None, comfy.utils.ProgressBar(len(latent))
    for index, entry in enumerate(latent.split(1)):
        entry = unpacked(model, entry.to("cpu", dtype))
        pixels = decoder.decode(entry, check_cancelled, needed).to(vae.output_device, out_dtype)
        if images is None:
            images = pixels.new_empty(len(latent), *pixels.shape[1:])
        images[index] = vae.process_output(pixels)[0]
        progress.update(1)
    return images.movedim(1, -1)
