"""Z-Image, with whole 32s of image tokens and without."""

import torch
import torch.nn.functional as F
from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers

from testing.cases.case import Case, Native

CONFIG = {
    "in_channels": 16,
    "dim": 64,
    "n_layers": 4,
    "n_refiner_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "cap_feat_dim": 24,
    "axes_dims": (4, 6, 6),
    "axes_lens": (4096, 512, 512),
}
NATIVE = {"dim": 1024, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 8, "n_kv_heads": 8, "axes_dims": (32, 48, 48)}
"""For ComfyUI, whose time embedding is as wide as diffusers' from here on."""
DETECTED = {
    "n_heads": 8,
    "n_kv_heads": 8,
    "n_refiner_layers": 1,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8 / 3,
    "multiple_of": 1,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
    "classes": {"ZImage": {"dim": NATIVE["dim"]}},
}
"""What ComfyUI takes from the width of 3840, and a feed-forward that is rounded as diffusers' is."""


def _tensors(generator, batch):
    return {"context": torch.randn(batch, 7, CONFIG["cap_feat_dim"], generator=generator)}


def _reference(model, x, timestep, tensors):
    height, width = x.shape[-2:]
    whole = F.pad(x, (0, width % 2, 0, height % 2), mode="circular")
    out = model(
        x=list(whole.unsqueeze(2).unbind()),
        t=1 - timestep,
        cap_feats=list(tensors["context"].unbind()),
        return_dict=False,
    )[0]
    return -torch.stack(out)[:, :, 0, :height, :width]


def adjust(model):
    """Norms around 1: only norms have weights that are vectors."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and name.endswith(".weight") and "norm_" not in name:
            parameter.data += 1


def _conditioning(generator):
    return torch.randn(1, 9, CONFIG["cap_feat_dim"], generator=generator), {}


def _case(name, latent, odd, native):
    return Case(
        name=name,
        family="z-image",
        config=CONFIG,
        latent=latent,
        odd=odd,
        tensors=_tensors,
        reference=_reference,
        convert=convert_z_image_transformer_checkpoint_to_diffusers,
        adjust=adjust,
        native=Native(CONFIG | NATIVE, _conditioning, native, detected=DETECTED),
    )


CASES = (
    _case("z-image-padded", (16, 16, 12), (16, 15, 11), (16, 18, 13)),
    _case("z-image", (16, 16, 16), (16, 15, 16), (16, 16, 16)),
)
