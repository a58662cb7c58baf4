"""Ovis-Image."""

import diffusers
import torch

from parallel_backend.families import FAMILIES
from testing.cases.case import Case, Native

CONFIG = {
    "patch_size": 1,
    "in_channels": 64,
    "out_channels": 64,
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
    "axes_dims_rope": (16, 56, 56),
}


def _diffusers(model):
    """diffusers' model with the weights of the family's."""
    state = dict(model.state_dict())
    for name in [name for name in state if ".gate_proj." in name]:
        up, down = (name.replace("gate_proj", other) for other in ("up_proj", "down_proj"))
        state[name.replace("gate_proj", "net.0.proj")] = torch.cat((state.pop(up), state.pop(name)))
        state[name.replace("gate_proj", "net.2")] = state.pop(down)
    theirs = diffusers.OvisImageTransformer2DModel(**model.config).eval()
    theirs.load_state_dict(state)
    return theirs


def _reference(model, x, timestep, tensors):
    patching, words = FAMILIES["ovis-image"].patching, tensors["context"].shape[1]
    rows, columns = (torch.arange(float(size)) for size in patching.grid(tuple(x.shape)))
    out = _diffusers(model)(
        hidden_states=patching.pack(x),
        encoder_hidden_states=tensors["context"],
        timestep=timestep,
        img_ids=torch.cartesian_prod(torch.zeros(1), rows, columns),
        txt_ids=torch.arange(float(words))[:, None] * torch.tensor([0.0, 1.0, 1.0]),
        return_dict=False,
    )[0]
    return patching.unpack(out, tuple(x.shape))


class Ovis(Case):
    def save_folder(self, model, path):
        _diffusers(model).save_pretrained(path)


CASES = (
    Ovis(
        name="ovis-image",
        family="ovis-image",
        config=CONFIG,
        latent=(16, 16, 12),
        odd=(16, 15, 11),
        tensors=lambda generator, batch: {"context": torch.randn(batch, 7, 24, generator=generator)},
        reference=_reference,
        native=Native(NATIVE, lambda generator: (torch.randn(1, 9, 24, generator=generator), {}), (16, 16, 16)),
    ),
)
