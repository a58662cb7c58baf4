"""HunyuanDiT 1.1, which knows the picture's size and a style, and 1.2, which does not."""

import ast
from pathlib import Path

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from diffusers.models.embeddings import get_2d_rotary_pos_embed_from_grid

from testing.cases.case import Case, Native

CONFIG = {
    "num_attention_heads": 3,  # two ranks have two of them and one
    "attention_head_dim": 16,
    "in_channels": 4,
    "patch_size": 2,
    "hidden_size": 48,
    "num_layers": 8,  # of which three hand their output over to later ones
    "learn_sigma": True,
    "cross_attention_dim": 24,
    "cross_attention_dim_t5": 32,
    "pooled_projection_dim": 20,
    "text_len": 5,
    "text_len_t5": 6,
    "use_style_cond_and_image_meta_size": True,
}
NATIVE = {"pooled_projection_dim": 1024}
DETECTED = {"num_heads": 3, "text_states_dim": 24, "text_states_dim_t5": 32, "text_len": 5, "text_len_t5": 6}
STYLED = {"image_model": "hydit1", "size_cond": True, "use_style_cond": True}


def _texts(generator, batch):
    words, t5_words = CONFIG["text_len"], CONFIG["text_len_t5"]
    return {
        "context": torch.randn(batch, words, CONFIG["cross_attention_dim"], generator=generator),
        "text_embedding_mask": torch.arange(words) < torch.randint(1, words, (batch, 1), generator=generator),
        "encoder_hidden_states_t5": torch.randn(batch, t5_words, CONFIG["cross_attention_dim_t5"], generator=generator),
        "text_embedding_mask_t5": torch.arange(t5_words) < torch.randint(1, t5_words, (batch, 1), generator=generator),
    }


def _tensors(sized):
    def make(generator, batch):
        size = {"image_meta_size": 1000 * torch.rand(batch, 6, generator=generator)}
        return _texts(generator, batch) | (size if sized else {})

    return make


def _crop_region():
    """The pipeline's function, without importing the pipeline, which needs transformers."""
    source = (Path(diffusers.__path__[0]) / "pipelines/hunyuandit/pipeline_hunyuandit.py").read_text()
    name, names = "get_resize_crop_region_for_grid", {}
    function = next(part for part in ast.parse(source).body if getattr(part, "name", None) == name)
    exec(ast.unparse(function), names)  # noqa: S102 (diffusers' own source)
    return names[name]


def _rotary(head, grid):
    """The authors' and ComfyUI's. diffusers 0.42 has others where a picture is no square: its steps are too long."""
    sides = (
        np.linspace(*edges, endpoint=False, dtype=np.float32) for edges in zip(*_crop_region()(grid, 32), grid, strict=True)
    )
    rows, columns = (torch.from_numpy(side) for side in np.meshgrid(*sides, indexing="ij"))
    return get_2d_rotary_pos_embed_from_grid(head, torch.stack((columns, rows)), use_real=True)


def _reference(model, x, timestep, tensors):
    height, width = x.shape[-2:]
    x = F.pad(x, (0, width % 2, 0, height % 2), mode="circular")
    grid = x.shape[-2] // 2, x.shape[-1] // 2
    out = model(
        hidden_states=x,
        timestep=timestep.float(),  # whose dtype the class takes for its weights
        encoder_hidden_states=tensors["context"],
        **{name: tensor for name, tensor in tensors.items() if name != "context"},
        style=torch.zeros(len(x), dtype=torch.long),
        image_rotary_emb=_rotary(model.config.attention_head_dim, grid),
        return_dict=False,
    )[0]
    return out.chunk(2, dim=1)[0][..., :height, :width]


def _conditioning(generator):
    tensors = _texts(generator, 1)
    extras = {
        "attention_mask": tensors["text_embedding_mask"],
        "conditioning_mt5xl": tensors["encoder_hidden_states_t5"],
        "attention_mask_mt5xl": tensors["text_embedding_mask_t5"],
        "width": 512,
        "height": 768,
    }
    return tensors["context"], extras


def _case(name, sized, odd):
    config = CONFIG | {"use_style_cond_and_image_meta_size": sized}
    return Case(
        name=name,
        family="hunyuan-dit",
        config=config,
        latent=(4, 16, 12),
        odd=odd,
        tensors=_tensors(sized),
        reference=_reference,
        timestep=700.0,
        # Samples reach 112.
        native=Native(
            config | NATIVE, _conditioning, (4, 17, 14), limit=2e-4, detected=DETECTED | (STYLED if sized else {})
        ),
    )


CASES = (_case("hunyuan-dit-1.1", True, (4, 15, 11)), _case("hunyuan-dit-1.2", False, (4, 11, 15)))
