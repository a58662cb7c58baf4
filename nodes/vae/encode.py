"""Parallel VAE Encode: ComfyUI's VAE, its encoder on the ranks in bands."""

import logging

from parallel_backend.client.vae import TooLittleMemory

from ..ui.input_checks import validate
from ..ui.node_text import say
from ..ui.widgets import CATEGORY
from .bands import encode_on_ranks, pixels_too_small, with_room
from .decode import DEVICES, check_vae, find_ranks
from .known import Cut, how_to_cut

log = logging.getLogger(__name__)


@validate()
class ParallelVAEEncode:
    CATEGORY = CATEGORY
    RETURN_TYPES = ("LATENT",)
    FUNCTION = "encode"
    DESCRIPTION = (
        "VAE Encode on several GPUs: each encodes a band of the picture or video, the result is that of one GPU. VAEs that "
        "it does not know are encoded whole by ComfyUI, and the node says so."
    )

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "pixels": ("IMAGE", {"tooltip": "The picture to encode, or a video's frames."}),
                "vae": ("VAE", {"tooltip": "The model's VAE, from Load VAE or a checkpoint loader."}),
            },
            "optional": {"devices": DEVICES},
        }

    def encode(self, pixels, vae, devices="auto"):
        check_vae(vae)
        pixels = pixels[..., : vae.output_channels]
        cut = how_to_cut(vae, "encoder", 2 + vae.latent_dim)
        reason = cut if isinstance(cut, str) else None
        if isinstance(cut, Cut):
            pool = find_ranks(devices)
            if pool is None or len(pool.devices) == 1:
                reason = "there is only one device for it"
            elif (reason := pixels_too_small(cut, vae, pixels, len(pool.devices))) is None:
                try:
                    samples = with_room(pool, lambda: encode_on_ranks(vae, cut, pixels, pool))
                    what = "tiles" if cut.kind.independent else f"{len(pool.devices)} bands"
                    say(f"Encoded in {what} on {', '.join(pool.devices)}.")
                    return ({"samples": samples},)
                except TooLittleMemory as short:
                    reason = str(short)
        log.info("Parallel VAE Encode: encoding whole in ComfyUI, since %s", reason)
        say(f"Encoded whole by ComfyUI, since {reason}.")
        return ({"samples": vae.encode(pixels)},)
