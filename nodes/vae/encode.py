"""Parallel VAE Encode: ComfyUI's VAE, its encoder on the ranks in bands."""

import logging

from ..ui.devices import check_devices
from ..ui.input_checks import validate
from ..ui.node_text import say
from ..ui.widgets import CATEGORY, link
from .bands import encode_on_ranks, pixels_too_small
from .decode import DEVICES, VAE, check_vae, computed_on_ranks
from .known import how_to_cut

log = logging.getLogger(__name__)


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
        samples, how = computed_on_ranks(vae, cut, pixels, devices, pixels_too_small, encode_on_ranks)
        if samples is None:
            log.info("Parallel VAE Encode: encoding whole in ComfyUI, because %s", how)
            say(f"Encoded whole by ComfyUI, because {how}.")
            return ({"samples": vae.encode(pixels)},)
        say(f"Encoded in {how}.")
        return ({"samples": samples},)
