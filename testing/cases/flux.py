"""Flux.1: dev with embedded guidance, schnell without, fill with a picture and a mask in its channels."""

import inspect
from collections.abc import Callable

import torch
from diffusers.loaders import single_file_utils

from parallel_backend.families import FAMILIES
from testing.cases.case import Case, Native
from testing.tiny import FLUX

# What ComfyUI's model detection takes: a width that is a multiple of 128 with rotary axes (16, 56, 56).
NATIVE = FLUX | {
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (16, 56, 56),
}

# Fill: 16 channels of the latent, 16 of a picture's, 64 of its mask.
FILL = {"guidance_embeds": True, "in_channels": 384, "out_channels": 64}


def with_width(converter: Callable, width: int) -> Callable:
    """diffusers' converter, which cuts fused layers at the real model's width, for a model of this width."""
    source, names = inspect.getsource(converter), dict(vars(single_file_utils))
    assert "inner_dim = 3072" in source
    exec(source.replace("inner_dim = 3072", f"inner_dim = {width}"), names)  # noqa: S102 (diffusers' own source)
    return names[converter.__name__]


def _tensors(config):
    def make(generator, batch):
        tensors = {
            "context": torch.randn(batch, 7, config["joint_attention_dim"], generator=generator),
            "pooled": torch.randn(batch, config["pooled_projection_dim"], generator=generator),
        }
        return tensors | ({"guidance": torch.full((batch,), 3.5)} if config["guidance_embeds"] else {})

    return make


def _reference(model, x, timestep, tensors):
    patching = FAMILIES["flux"].patching
    rows, columns = patching.grid(tuple(x.shape))
    out = model(
        hidden_states=patching.pack(x),
        encoder_hidden_states=tensors["context"],
        pooled_projections=tensors["pooled"],
        guidance=tensors.get("guidance"),
        timestep=timestep,
        img_ids=torch.cartesian_prod(torch.zeros(1), torch.arange(rows).float(), torch.arange(columns).float()),
        txt_ids=torch.zeros(tensors["context"].shape[1], 3),
        return_dict=False,
    )[0]
    return patching.unpack(out, tuple(x.shape))


def _conditioning(generator):
    return torch.randn(1, 9, 64, generator=generator), {"pooled_output": torch.randn(1, 32, generator=generator)}


def _fill_conditioning(generator):
    text, extras = _conditioning(generator)
    picture = {"concat_latent_image": torch.randn(1, 16, 16, 16, generator=generator)}
    return text, extras | picture | {"concat_mask": torch.rand(1, 1, 128, 128, generator=generator)}


def _case(name, changes, conditioning=_conditioning):
    config = FLUX | changes
    channels = config["in_channels"] // 4
    return Case(
        name=name,
        family="flux",
        config=config,
        latent=(channels, 16, 12),
        odd=(channels, 15, 11),
        tensors=_tensors(config),
        reference=_reference,
        convert=with_width(single_file_utils.convert_flux_transformer_checkpoint_to_diffusers, 128),
        sampled=channels == 16,
        native=Native(NATIVE | changes, conditioning, (16, 16, 16)),
    )


CASES = (
    _case("flux-dev", {"guidance_embeds": True}),
    _case("flux-schnell", {"guidance_embeds": False}),
    _case("flux-fill", FILL, _fill_conditioning),
)
