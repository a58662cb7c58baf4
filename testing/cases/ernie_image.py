"""ERNIE-Image."""

import diffusers
import torch

from testing.cases.case import Case, Native

CONFIG = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_layers": 4,
    "ffn_hidden_size": 96,
    "in_channels": 16,
    "out_channels": 16,
    "text_in_dim": 24,
    "rope_axes_dim": (4, 6, 6),
}
NATIVE = CONFIG | {"in_channels": 128, "out_channels": 128, "num_layers": 2}


def _reference(model, x, timestep, tensors):
    theirs = diffusers.ErnieImageTransformer2DModel(**model.config)
    theirs.load_state_dict(model.state_dict())
    words = tensors["context"]
    return theirs(x, timestep, words, torch.full((len(x),), words.shape[1]), return_dict=False)[0]


def _adjust(model):
    """At these times the latent and the residual stream are large: attention is made large too, so that its errors show."""
    for layer in model.layers:
        layer.self_attention.to_out[0].weight.data *= 6


CASES = (
    Case(
        name="ernie-image",
        family="ernie-image",
        config=CONFIG,
        latent=(16, 9, 7),
        odd=None,
        tensors=lambda generator, batch: {"context": torch.randn(batch, 7, 24, generator=generator)},
        reference=_reference,
        timestep=300.0,
        adjust=_adjust,
        native=Native(
            NATIVE,
            lambda generator: (torch.randn(1, 9, 24, generator=generator), {}),
            (128, 8, 8),
            detected=NATIVE,
        ),
    ),
)
