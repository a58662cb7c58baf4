"""Flux.2: dev with embedded guidance, klein without."""

import torch
from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers

from parallel_backend.families import FAMILIES
from testing.cases.case import Case, Native

CONFIG = {
    "patch_size": 1,
    "in_channels": 8,
    "num_layers": 3,
    "num_single_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 3,  # two ranks have two of them and one
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 4, 4, 4),
}
NATIVE = CONFIG | {
    "in_channels": 128,
    "num_layers": 2,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "axes_dims_rope": (32, 32, 32, 32),
}


def _tensors(guidance):
    def make(generator, batch):
        tensors = {"context": torch.randn(batch, 7, CONFIG["joint_attention_dim"], generator=generator)}
        return tensors | ({"guidance": torch.full((batch,), 3.5)} if guidance else {})

    return make


def _reference(model, x, timestep, tensors):
    patching, words = FAMILIES["flux2"].patching, tensors["context"].shape[1]
    zero, (rows, columns) = torch.zeros(1), (torch.arange(size).float() for size in x.shape[-2:])
    out = model(
        hidden_states=patching.pack(x),
        encoder_hidden_states=tensors["context"],
        timestep=timestep,
        guidance=tensors.get("guidance"),
        img_ids=torch.cartesian_prod(zero, rows, columns, zero),
        txt_ids=torch.cartesian_prod(zero, zero, zero, torch.arange(words).float()),
        return_dict=False,
    )[0]
    return patching.unpack(out, tuple(x.shape))


def _case(name, guidance, words):
    return Case(
        name=name,
        family="flux2",
        config=CONFIG | {"guidance_embeds": guidance},
        latent=(8, 9, 7),
        odd=None,
        tensors=_tensors(guidance),
        reference=_reference,
        convert=convert_flux2_transformer_checkpoint_to_diffusers,
        native=Native(
            NATIVE | {"guidance_embeds": guidance},
            lambda generator: (torch.randn(1, words, 24, generator=generator), {}),
            (128, 8, 8),
        ),
    )


CASES = (_case("flux2-dev", True, 9), _case("flux2-klein", False, 512))
