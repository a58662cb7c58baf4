"""CogVideoX: 5b's rotary positions and 2b's added ones (1.0), patches of two frames and pictures (1.5)."""

import ast
from pathlib import Path

import diffusers
import torch
import torch.nn.functional as F
from diffusers.models.embeddings import get_3d_rotary_pos_embed

from parallel_backend.families.cogvideox import HEADS_OF_2B
from testing.cases.case import Case, Native, norms_near_one

CONFIG = {
    "num_attention_heads": 3,  # two ranks have two of them and one
    "attention_head_dim": 16,
    "in_channels": 6,
    "out_channels": 6,
    "time_embed_dim": 20,
    "ofs_embed_dim": None,
    "text_embed_dim": 24,
    "num_layers": 4,
    "attention_bias": True,
    "patch_size_t": None,
    "use_rotary_positional_embeddings": True,
    "sample_height": 60,
    "sample_width": 90,
    "max_text_seq_length": 226,
}
NATIVE = {
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "time_embed_dim": 32,
    "num_layers": 3,
}
SMALL = {"num_attention_heads": HEADS_OF_2B, "attention_head_dim": 8, "use_rotary_positional_embeddings": False}
NEW = {"patch_size_t": 2}
OFFSET = {"in_channels": 12, "ofs_embed_dim": 20}
STRETCHED = (
    "ComfyUI 0.33 stretches 1.0's rotary positions by 1.875; by 7.5, those of this latent are the authors' and diffusers'"
)
ROTARY = "ComfyUI 0.33 takes 2b's positions for rotary ones, and those that it can add are not diffusers'"

FIRST_SIGMA_LIMIT = 1e-3
"""The first sigma is 4519, and so is the latent then: one rounding of the native model's output (1.2e-7 of it) moves the
result by 1.7e-4."""


def _tensors(config, words):
    def make(generator, batch):
        tensors = {"context": torch.randn(batch, words, config["text_embed_dim"], generator=generator)}
        return tensors | ({"ofs": torch.full((batch,), 2.0)} if config["ofs_embed_dim"] else {})

    return make


def _crop_region():
    """The pipeline's function, without importing the pipeline, which needs transformers."""
    source = (Path(diffusers.__path__[0]) / "pipelines/cogvideo/pipeline_cogvideox.py").read_text()
    name, names = "get_resize_crop_region_for_grid", {}
    function = next(part for part in ast.parse(source).body if getattr(part, "name", None) == name)
    exec(ast.unparse(function), names)  # noqa: S102 (diffusers' own source)
    return names[name]


def _rotary(config, frames, rows, columns):
    """As CogVideoXPipeline._prepare_rotary_positional_embeddings makes them."""
    base = config.sample_width // 2, config.sample_height // 2
    if config.patch_size_t is None:
        grid = {"crops_coords": _crop_region()((rows, columns), *base)}
    else:
        grid = {"crops_coords": None, "grid_type": "slice", "max_size": base[::-1]}
    return get_3d_rotary_pos_embed(config.attention_head_dim, grid_size=(rows, columns), temporal_size=frames, **grid)


def _reference(model, x, timestep, tensors):
    config, (frames, height, width) = model.config, x.shape[-3:]
    by = config.patch_size_t or 1
    x = F.pad(x, (0, width % 2, 0, height % 2, 0, frames % by), mode="circular").transpose(1, 2)
    grid = x.shape[1] // by, x.shape[3] // 2, x.shape[4] // 2
    out = model(
        hidden_states=x,
        encoder_hidden_states=tensors["context"],
        timestep=timestep,
        ofs=tensors.get("ofs"),
        image_rotary_emb=_rotary(config, *grid) if config.use_rotary_positional_embeddings else None,
        return_dict=False,
    )[0]
    return out.transpose(1, 2)[:, :, :frames, :height, :width]


def _conditioning(picture):
    def make(generator):
        extras = {"concat_latent_image": torch.randn(1, 16, 4, 10, 8, generator=generator)} if picture else {}
        return torch.randn(1, 9, CONFIG["text_embed_dim"], generator=generator), extras

    return make


def _case(name, changes, latent, odd, words=7, **others):
    config = CONFIG | changes
    channels = config["in_channels"]
    return Case(
        name=name,
        family="cogvideox-1.5" if config["patch_size_t"] else "cogvideox",
        config=config,
        latent=(channels, *latent),
        odd=(channels, *odd),
        tensors=_tensors(config, words),
        reference=_reference,
        timestep=700.0,
        adjust=norms_near_one("norm1.norm.weight", "norm2.norm.weight"),
        sampled=channels == config["out_channels"],
        **others,
    )


def _native(changes, picture=False, latent=(4, 10, 8), detected=None):
    config = CONFIG | NATIVE | changes
    return Native(config, _conditioning(picture), (16, *latent), limit=FIRST_SIGMA_LIMIT, detected=detected or {})


CASES = (
    _case(
        "cogvideox-5b",
        {},
        (3, 10, 8),
        (2, 9, 7),
        native=_native({}, latent=(3, 8, 12), detected={"spatial_interpolation_scale": 7.5}),
        notes={"native": STRETCHED},
    ),
    _case(
        "cogvideox-2b",
        SMALL,
        (2, 10, 6),
        (2, 9, 7),
        words=226,
        notes={"native": ROTARY},
    ),
    _case("cogvideox-1.5", NEW, (4, 10, 8), (3, 9, 7), native=_native(NEW)),
    _case(
        "cogvideox-1.5-i2v",
        NEW | OFFSET,
        (4, 10, 8),
        (3, 9, 7),
        native=_native(NEW | {"in_channels": 32, "ofs_embed_dim": 32}, picture=True),
    ),
)
