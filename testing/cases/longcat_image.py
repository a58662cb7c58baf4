"""LongCat-Image. Its pipeline fills the text up to 512 positions; ComfyUI has as many as it has tokens, and so have we."""

import torch

from parallel_backend.families import FAMILIES
from testing.cases.case import Case, Native

CONFIG = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 3,
    "num_single_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
NATIVE = CONFIG | {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "joint_attention_dim": 3584,  # by which ComfyUI knows it
    "axes_dims_rope": (16, 56, 56),
}


def _reference(model, x, timestep, tensors):
    patching, words = FAMILIES["longcat-image"].patching, tensors["context"].shape[1]
    rows, columns = (torch.arange(float(size)) + words for size in patching.grid(tuple(x.shape)))
    out = model(
        hidden_states=patching.pack(x),
        encoder_hidden_states=tensors["context"],
        timestep=timestep,
        img_ids=torch.cartesian_prod(torch.ones(1), rows, columns),
        txt_ids=torch.arange(float(words))[:, None] * torch.tensor([0.0, 1.0, 1.0]),
        return_dict=False,
    )[0]
    return patching.unpack(out, tuple(x.shape))


CASES = (
    Case(
        name="longcat-image",
        family="longcat-image",
        config=CONFIG,
        latent=(16, 16, 12),
        odd=(16, 15, 11),
        tensors=lambda generator, batch: {"context": torch.randn(batch, 7, 24, generator=generator)},
        reference=_reference,
        native=Native(NATIVE, lambda generator: (torch.randn(1, 9, 3584, generator=generator), {}), (16, 16, 16)),
    ),
)
