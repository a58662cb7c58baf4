"""Parallel VAE Decode: ComfyUI's VAE, its decoder on the ranks in bands."""

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
from .bands import decode_on_ranks, too_small, with_room
from .known import Cut, how_to_cut

log = logging.getLogger(__name__)

VAE = link("VAE", "The model's VAE, from Load VAE or a checkpoint loader.")
DEVICES = text(
    "auto",
    "auto (the loaded model's GPUs, or all GPUs), or a list such as cuda:0,cuda:1. A list that mixes some of the loaded "
    "model's GPUs with others ends that model's processes.",
)


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
        if isinstance(cut, Cut):
            _check_channels(vae, latent)
        images, how = computed_on_ranks(vae, cut, latent, devices, too_small, decode_on_ranks)
        if images is None:
            log.info("Parallel VAE Decode: decoding whole in ComfyUI, because %s", how)
            say(f"Decoded whole by ComfyUI, because {how}.")
            return (_pictures(vae.decode(latent)),)
        say(f"Decoded in {how}.")
        return (_pictures(images),)


def computed_on_ranks(
    vae: Any, cut: Cut | str, x: torch.Tensor, devices: str, why_too_small: Callable[..., str | None], compute: Callable
) -> tuple[torch.Tensor | None, str]:
    """(`compute` of x on the ranks of the widget `devices`, how), or (None, reason why ComfyUI has to compute it whole)."""
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
    """ValueError for an input that is no VAE of ComfyUI's."""
    if not all(hasattr(vae, name) for name in ("decode", "encode", "latent_dim", "first_stage_model")):
        raise ValueError("vae: this is not a VAE. Connect Load VAE, or the VAE of a checkpoint loader.")


def _check_channels(vae, latent) -> None:
    needed = vae.latent_channels
    if latent.shape[1] != needed:
        raise ValueError(
            f"samples: the latent has {latent.shape[1]} channels, this VAE needs {needed}. Use the VAE that belongs to the "
            "latent's model."
        )


def _pictures(images):
    """Videos [B, frames, rows, columns, 3] -> IMAGE [B * frames, rows, columns, 3]. Images are not changed."""
    return images.reshape(-1, *images.shape[-3:]) if images.ndim == 5 else images


def find_ranks(devices: str) -> SomeRanks | None:
    """Ranks on the named devices, started if necessary. None: `auto`, and there is a single device."""
    if not is_auto(devices):
        return registry().pool_for(named_devices(devices), check_cancelled)
    running, all_gpus = registry().pool_for(None, check_cancelled), gpus()
    return running if running is not None or len(all_gpus) < 2 else registry().pool_for(all_gpus, check_cancelled)
