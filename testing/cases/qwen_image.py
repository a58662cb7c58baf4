"""Qwen-Image."""

from dataclasses import replace

import torch

from parallel_backend.families import FAMILIES
from parallel_backend.families.base.step_inputs import TEXT_MASK
from parallel_backend.families.qwen_image import EDIT_2511 as EDIT_2511
from testing.cases.case import Case, Native

CONFIG = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
NATIVE = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "joint_attention_dim": 64,
    "axes_dims_rope": (16, 56, 56),
}
"""For ComfyUI, which takes a head's width and its rotary axes for granted."""


def _tensors(generator, batch):
    return {"context": torch.randn(batch, 7, CONFIG["joint_attention_dim"], generator=generator)}


def _masked(generator, batch):
    seen = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])
    return _tensors(generator, batch) | {TEXT_MASK: seen[:batch]}


def _reference(model, x, timestep, tensors):
    patching = replace(FAMILIES["qwen-image"].patching, along="frames")  # the class's own order of tokens
    out = model(
        hidden_states=patching.pack(x),
        encoder_hidden_states=tensors["context"],
        encoder_hidden_states_mask=tensors.get(TEXT_MASK),
        timestep=timestep,
        img_shapes=[[patching.grid(x.shape)]] * len(x),
        return_dict=False,
    )[0]
    return patching.unpack(out, tuple(x.shape))


def _conditioning(generator):
    return torch.randn(1, 9, 64, generator=generator), {}


def _masked_conditioning(generator):
    return _conditioning(generator)[0], {"attention_mask": torch.tensor([[1] * 6 + [0] * 3])}


def _case(name, tensors, conditioning, latent):
    detected = {"num_attention_heads": 2, "joint_attention_dim": 64}
    return Case(
        name=name,
        family="qwen-image",
        config=CONFIG,
        latent=(16, 1, 16, 12),
        odd=(16, 1, 15, 11),
        tensors=tensors,
        reference=_reference,
        native=Native(CONFIG | NATIVE, conditioning, latent, detected=detected),
        notes={"odd": "an even number of token rows and columns: ComfyUI's positions of odd ones are not diffusers'"},
    )


CASES = (
    _case("qwen-image", _tensors, _conditioning, (16, 1, 18, 13)),
    _case("qwen-image-masked-text", _masked, _masked_conditioning, (16, 2, 16, 12)),
)
