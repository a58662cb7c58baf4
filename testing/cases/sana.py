"""Sana 1.0, and 1.5 with its query and key norms."""

import torch
from diffusers.loaders.single_file_utils import convert_sana_transformer_to_diffusers

from parallel_backend.core.degrees import Degrees
from testing.cases.case import Case

CONFIG = {
    "in_channels": 6,
    "out_channels": 6,
    "num_attention_heads": 7,
    "attention_head_dim": 32,
    "num_layers": 3,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 112,
    "cross_attention_dim": 224,
    "caption_channels": 24,
    "mlp_ratio": 2.5,
    "sample_size": 32,
    "qk_norm": None,
}
# Shards end within a row; those of four ranks are sent whole, since others look at all of their tokens.
MODES = (Degrees(batch=2), Degrees(ulysses=2), Degrees(ring=2), Degrees(ulysses=3), Degrees(ring=2, ulysses=2))


def _tensors(generator, batch):
    return {
        "context": torch.randn(batch, 7, CONFIG["caption_channels"], generator=generator),
        "mask": torch.arange(7) < torch.randint(3, 7, (batch, 1), generator=generator),
    }


def _reference(model, x, timestep, tensors):
    return model(
        hidden_states=x,
        encoder_hidden_states=tensors["context"],
        encoder_attention_mask=tensors["mask"].long(),
        timestep=timestep,
        return_dict=False,
    )[0]


def _convert(state):
    """diffusers' converter, which counts on the files' keys without use. It knows no norms."""
    return convert_sana_transformer_to_diffusers(state | {"pos_embed": None, "y_embedder.y_embedding": None})


def _case(name, changes, **others):
    return Case(
        name=name,
        family="sana",
        config=CONFIG | changes,
        latent=(6, 8, 6),
        odd=(6, 7, 5),
        tensors=_tensors,
        reference=_reference,
        timestep=700.0,
        modes=MODES,
        sampled=False,  # in bands, which linear attention has no old keys for
        notes={"native": "ComfyUI 0.33 has no Sana"},
        **others,
    )


CASES = (
    _case("sana", {}, convert=_convert),
    _case("sana-1.5", {"qk_norm": "rms_norm_across_heads"}),
)
