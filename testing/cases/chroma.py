"""Chroma."""

import torch
from diffusers.loaders.single_file_utils import convert_chroma_transformer_checkpoint_to_diffusers

from parallel_backend.families import FAMILIES
from testing.cases.case import Case, Native
from testing.cases.flux import with_width

CONFIG = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 3,
    "num_single_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
    "approximator_num_channels": 64,
    "approximator_hidden_dim": 40,
    "approximator_layers": 2,
}
# ComfyUI's model counts on 344 modulation vectors: 3 for each single block, 12 for each double one, and 2.
NATIVE = CONFIG | {"num_layers": 28, "num_single_layers": 2}
DETECTED = {"axes_dim": [4, 6, 6], "num_heads": 4, "out_dim": 64, "hidden_dim": 40, "n_layers": 2}


def _tensors(generator, batch):
    return {"context": torch.randn(batch, 7, CONFIG["joint_attention_dim"], generator=generator)}


def _reference(model, x, timestep, tensors):
    patching = FAMILIES["chroma"].patching
    rows, columns = patching.grid(tuple(x.shape))
    out = model(
        hidden_states=patching.pack(x),
        encoder_hidden_states=tensors["context"],
        timestep=timestep,
        img_ids=torch.cartesian_prod(torch.zeros(1), torch.arange(rows).float(), torch.arange(columns).float()),
        txt_ids=torch.zeros(tensors["context"].shape[1], 3),
        return_dict=False,
    )[0]
    return patching.unpack(out, tuple(x.shape))


CASES = (
    Case(
        name="chroma",
        family="chroma",
        config=CONFIG,
        latent=(16, 16, 12),
        odd=(16, 15, 11),
        tensors=_tensors,
        reference=_reference,
        convert=with_width(convert_chroma_transformer_checkpoint_to_diffusers, 64),
        native=Native(
            NATIVE, lambda generator: (torch.randn(1, 9, 24, generator=generator), {}), (16, 16, 16), detected=DETECTED
        ),
    ),
)
