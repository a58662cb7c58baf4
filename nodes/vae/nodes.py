"""Parallel VAE Decode and Encode: run the decoder or encoder of ComfyUI's VAE on the ranks, in bands."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from parallel_backend.client.registry import registry
from parallel_backend.client.vae import NotExact, TooLittleMemory
from parallel_backend.processes.pool_part import SomeRanks

from ..ui.devices import check_devices, gpus, is_auto, named_devices
from ..ui.host import check_cancelled
from ..ui.input_checks import validate
from ..ui.node_text import say
from ..ui.widgets import CATEGORY, link, text
from .bands import decode_on_ranks, encode_on_ranks, pixels_too_small, too_small, with_room
from .known import Cut, how_to_cut

log = logging.getLogger(__name__)

VAE = link("VAE", "The model's VAE, from Load VAE or a checkpoint loader.")
DEVICES = text(
    "auto",
    "auto (the loaded model's GPUs, or all GPUs), or a list such as cuda:0,cuda:1. A list that mixes some of the loaded "
    "model's GPUs with others ends that model's processes.",
)
WAYS: dict[str, tuple[Callable[..., str | None], Callable[..., torch.Tensor], str]] = {
    "Decoded": (too_small, decode_on_ranks, "Decoded whole by ComfyUI, because %s."),
    "Encoded": (pixels_too_small, encode_on_ranks, "Encoded whole by ComfyUI, because %s."),
}
"""Participle -> (function that says why ranks cannot do it, function that does it on ranks, text if ComfyUI does it)."""


@validate(early=check_devices)
class ParallelVAEDecode:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("multi gpu", "multigpu", "vae decode", "decode latent", "distributed")
    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "decode"
    DESCRIPTION = (
        "VAE Decode on several GPUs. Each decodes a part of the image or video. The result is the same as on one GPU. "
        "ComfyUI decodes unknown VAEs whole, and the node says so."
    )

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"samples": link("LATENT", "The latent to decode."), "vae": VAE},
            "optional": {"devices": DEVICES},
        }

    def decode(self, samples, vae, devices="auto"):
        check_vae(vae)
        latent = samples["samples"]
        if latent.is_nested:
            latent = latent.unbind()[0]
        if vae.latent_dim == 2 and latent.ndim == 5:
            latent = latent[:, :, 0]
        cut = how_to_cut(vae, "decoder", latent.ndim)
        if isinstance(cut, Cut) and latent.shape[1] != vae.latent_channels:
            raise ValueError(
                f"samples: the latent has {latent.shape[1]} channels, this VAE needs {vae.latent_channels}. Use the VAE "
                "that belongs to the latent's model."
            )
        images = computed_on_ranks("Decoded", vae, cut, latent, devices)
        images = vae.decode(latent) if images is None else images
        # Of videos [B, frames, rows, columns, 3].
        return (images.reshape(-1, *images.shape[-3:]) if images.ndim == 5 else images,)


@validate(early=check_devices)
class ParallelVAEEncode:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("multi gpu", "multigpu", "vae encode", "encode image", "distributed")
    RETURN_TYPES = ("LATENT",)
    FUNCTION = "encode"
    DESCRIPTION = (
        "VAE Encode on several GPUs. Each encodes a part of the image or video. The result is the same as on one GPU. "
        "ComfyUI encodes unknown VAEs whole, and the node says so."
    )

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"pixels": link("IMAGE", "The image to encode, or a video's frames."), "vae": VAE},
            "optional": {"devices": DEVICES},
        }

    def encode(self, pixels, vae, devices="auto"):
        check_vae(vae)
        pixels = pixels[..., : vae.output_channels]
        cut = how_to_cut(vae, "encoder", 2 + vae.latent_dim)
        samples = computed_on_ranks("Encoded", vae, cut, pixels, devices)
        return ({"samples": vae.encode(pixels) if samples is None else samples},)


def computed_on_ranks(did: str, vae: Any, cut: Cut | str, x: torch.Tensor, devices: str) -> torch.Tensor | None:
    """Return x decoded or encoded (`did`) on the ranks of the widget `devices`, or None if ComfyUI must compute it whole.
    Shows the user which it is."""
    result, how = _computed(did, vae, cut, x, devices)
    text = f"{did} in {how}." if result is not None else WAYS[did][2] % how
    log.info("Parallel DiT: %s", text)
    say(text)
    return result


def _computed(did: str, vae: Any, cut: Cut | str, x: torch.Tensor, devices: str) -> tuple[torch.Tensor | None, str]:
    """Return the result and how it was computed, or None and the reason why ComfyUI must compute it whole."""
    why_too_small, compute, _ = WAYS[did]
    if isinstance(cut, str):
        return None, cut
    pool = find_ranks(devices)
    if pool is None or len(pool.devices) == 1:
        return None, "there is only one device for it"
    if (reason := why_too_small(cut, vae, x, len(pool.devices))) is not None:
        return None, reason
    try:
        result = with_room(pool, lambda: compute(vae, cut, x, pool))
    except (TooLittleMemory, NotExact) as why_not:
        return None, str(why_not)
    return result, f"{'tiles' if cut.known.tiles else f'{len(pool.devices)} parts'} on {', '.join(pool.devices)}"


def check_vae(vae) -> None:
    """Raise ValueError if an input is not a VAE of ComfyUI."""
    if not all(hasattr(vae, name) for name in ("decode", "encode", "latent_dim", "first_stage_model")):
        raise ValueError("vae: this is not a VAE. Connect Load VAE, or the VAE of a checkpoint loader.")


def find_ranks(devices: str) -> SomeRanks | None:
    """Return ranks on the named devices, started if necessary. None: the text is `auto`, and there is only one device."""
    if not is_auto(devices):
        return registry().pool_for(named_devices(devices), check_cancelled)
    running, all_gpus = registry().pool_for(None, check_cancelled), gpus()
    return running if running is not None or len(all_gpus) < 2 else registry().pool_for(all_gpus, check_cancelled)
