"""Krea 2, its norms' weights small: their scale is 1 + weight."""

import torch

from parallel_backend.families import FAMILIES
from testing.cases.case import Case, Native

CONFIG = {
    "in_channels": 64,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "timestep_embed_dim": 32,
    "text_hidden_dim": 24,
    "num_text_layers": 3,
    "text_num_attention_heads": 3,
    "text_num_key_value_heads": 3,
    "text_intermediate_size": 128,
    "num_layerwise_text_blocks": 2,
    "num_refiner_text_blocks": 2,
    "axes_dims_rope": (4, 6, 6),
}
NATIVE = CONFIG | {
    "num_layers": 2,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 768,
    "timestep_embed_dim": 256,
    "axes_dims_rope": (32, 48, 48),
}
"""For ComfyUI, which takes a head's width, the time's and that of feed-forwards for granted."""
WIDTH = CONFIG["num_text_layers"] * CONFIG["text_hidden_dim"]


def _tensors(generator, batch):
    return {"context": torch.randn(batch, 7, WIDTH, generator=generator)}


def _reference(model, x, timestep, tensors):
    patching, context = FAMILIES["krea2"].patching, tensors["context"]
    _, rows, columns = patching.grid(x.shape)
    image_ids = torch.cartesian_prod(torch.zeros(1), torch.arange(float(rows)), torch.arange(float(columns)))
    out = model(
        hidden_states=patching.pack(x),
        encoder_hidden_states=context.unflatten(-1, (CONFIG["num_text_layers"], -1)),
        timestep=timestep,
        position_ids=torch.cat((torch.zeros(context.shape[1], 3), image_ids)),
        return_dict=False,
    )[0]
    return patching.unpack(out, tuple(x.shape))


CASES = (
    Case(
        name="krea2",
        family="krea2",
        config=CONFIG,
        latent=(16, 1, 16, 12),
        odd=(16, 1, 15, 11),
        tensors=_tensors,
        reference=_reference,
        native=Native(
            NATIVE,
            lambda generator: (torch.randn(1, 9, WIDTH, generator=generator), {}),
            (16, 1, 18, 13),
            detected={"txtheads": 3, "txtkvheads": 3},
        ),
    ),
)
