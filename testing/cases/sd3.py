"""Stable Diffusion 3 and 3.5."""

import torch
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

from testing import tiny
from testing.cases.case import Case, Native

# ComfyUI takes depth and heads from the width: one of either for each 64 of it.
NATIVE = tiny.SD3 | {
    "num_layers": 3,
    "attention_head_dim": 64,
    "num_attention_heads": 3,
    "caption_projection_dim": 192,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
}


def _tensors(generator, batch):
    return {
        "context": torch.randn(batch, 7, tiny.SD3["joint_attention_dim"], generator=generator),
        "pooled": torch.randn(batch, tiny.SD3["pooled_projection_dim"], generator=generator),
    }


def _adjust(model):
    """A table of positions that is no function of its size."""
    shape = model.pos_embed.pos_embed.shape
    model.pos_embed.pos_embed = torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _conditioning(generator):
    return torch.randn(1, 9, 64, generator=generator), {"pooled_output": torch.randn(1, 32, generator=generator)}


def _case(name, config, native):
    return Case(
        name=name,
        family="sd3",
        config=config,
        latent=(16, 16, 12),
        odd=(16, 15, 11),
        tensors=_tensors,
        reference=tiny.sd3_reference,
        timestep=700.0,
        convert=convert_sd3_transformer_checkpoint_to_diffusers,
        adjust=_adjust,
        native=Native(native, _conditioning, (16, 16, 16)),
    )


CASES = (
    _case("sd3.5-large", tiny.SD3, NATIVE),
    _case("sd3.5-medium", tiny.SD3 | {"dual_attention_layers": (0, 1)}, NATIVE | {"dual_attention_layers": (0, 1)}),
)
