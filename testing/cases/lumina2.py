"""Lumina 2."""

import torch
import torch.nn.functional as F
from diffusers.loaders.single_file_utils import convert_lumina2_to_diffusers

from testing.cases.case import Case, Native
from testing.cases.z_image import adjust

CONFIG = {
    "in_channels": 16,
    "hidden_size": 108,
    "num_layers": 4,
    "num_refiner_layers": 2,
    "num_attention_heads": 9,
    "num_kv_heads": 3,
    "multiple_of": 432,
    "axes_dim_rope": (4, 4, 4),
    "axes_lens": (4096, 512, 512),
    "cap_feat_dim": 24,
}
NATIVE = {
    "hidden_size": 192,
    "num_layers": 2,
    "num_attention_heads": 6,
    "num_kv_heads": 3,
    "multiple_of": 768,
    "axes_dim_rope": (12, 10, 10),
}
DETECTED = {
    "n_heads": 6,
    "n_kv_heads": 3,
    "axes_dims": [12, 10, 10],
    "axes_lens": [300, 512, 512],
    "rope_theta": 10000.0,
    "ffn_dim_multiplier": 4.0,
}
"""What ComfyUI takes from the width of 2304."""


def _tensors(generator, batch):
    return {"context": torch.randn(batch, 7, CONFIG["cap_feat_dim"], generator=generator)}


def _reference(model, x, timestep, tensors):
    height, width = x.shape[-2:]
    out = model(
        hidden_states=F.pad(x, (0, width % 2, 0, height % 2), mode="circular"),
        timestep=1 - timestep,
        encoder_hidden_states=tensors["context"],
        encoder_attention_mask=torch.ones(tensors["context"].shape[:2]).long(),
        return_dict=False,
    )[0]
    return -out[..., :height, :width]


def _convert(state):
    """diffusers' converter knows one width of queries and one of keys: smaller ones are filled up for it."""
    widths = {"to_q": 108, "to_k": 36, "to_v": 36}
    for key, value in state.items():
        if "qkv" in key:
            parts = zip(value.split(list(widths.values())), (2304, 768, 768), strict=True)
            state[key] = torch.cat([F.pad(part, (0, 0, 0, rows - len(part))) for part, rows in parts])
    converted = convert_lumina2_to_diffusers(state)
    return {key: value[: widths.get(key.split(".")[-2])] for key, value in converted.items()}


def _conditioning(generator):
    return torch.randn(1, 9, CONFIG["cap_feat_dim"], generator=generator), {}


CASES = (
    Case(
        name="lumina2",
        family="lumina2",
        config=CONFIG,
        latent=(16, 16, 12),
        odd=(16, 15, 11),
        tensors=_tensors,
        reference=_reference,
        convert=_convert,
        adjust=adjust,
        native=Native(CONFIG | NATIVE, _conditioning, (16, 18, 13), detected=DETECTED),
    ),
)
