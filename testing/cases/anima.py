"""Anima: Cosmos Predict2's case for pictures, and for ComfyUI an adapter that the text passes first."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from parallel_backend.families.anima import ADAPTER
from testing.cases import cosmos_predict2
from testing.cases.case import Case, Native

IMAGE = cosmos_predict2.IMAGE
WIDTH, SOURCE, MODEL, HEADS, LAYERS = IMAGE["text_embed_dim"], 12, 16, 2, 2
"""Of the adapter: channels of what it gives, of the language model's output, and of its own; heads, and layers."""
VOCABULARY = 32128
"""T5's, which ComfyUI's class takes for granted."""


@dataclass(frozen=True)
class WithAdapter(Case):
    def save(self, model, path: Path, config=None) -> Path:
        """With the adapter, which tells the file from Cosmos Predict2's."""
        save_file(load_file(super().save(model, path, config)) | adapter(), path)
        return path


def adapter() -> dict[str, torch.Tensor]:
    """Random weights of a small one, by their keys in a file."""
    generator = torch.Generator().manual_seed(7)
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCABULARY, WIDTH),
        "in_proj.weight": (MODEL, WIDTH),
        "in_proj.bias": (MODEL,),
        "out_proj.weight": (WIDTH, MODEL),
        "out_proj.bias": (WIDTH,),
        "norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        block = f"blocks.{layer}."
        for attention, source in (("self_attn", MODEL), ("cross_attn", SOURCE)):
            for part, channels in (("q", MODEL), ("k", source), ("v", source), ("o", MODEL)):
                shapes[f"{block}{attention}.{part}_proj.weight"] = (MODEL, channels)
            shapes |= {f"{block}{attention}.{part}_norm.weight": (MODEL // HEADS,) for part in "qk"}
        shapes |= {f"{block}{norm}.weight": (MODEL,) for norm in ("norm_self_attn", "norm_cross_attn", "norm_mlp")}
        shapes |= {f"{block}mlp.0.weight": (4 * MODEL, MODEL), f"{block}mlp.0.bias": (4 * MODEL,)}
        shapes |= {f"{block}mlp.2.weight": (MODEL, 4 * MODEL), f"{block}mlp.2.bias": (MODEL,)}
    values = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    return {f"{ADAPTER}{name}": value + ("norm" in name) for name, value in values.items()}


def _conditioning(generator):
    """The language model's output, T5's tokens of the same prompt, and their weights."""
    ids = torch.randint(0, VOCABULARY, (9,), generator=generator)
    extras = {"t5xxl_ids": ids, "t5xxl_weights": 1 + torch.rand(9, generator=generator) / 2}
    return torch.randn(1, 7, SOURCE, generator=generator), extras


(_IMAGE_CASE,) = (case for case in cosmos_predict2.CASES if case.name == "cosmos-predict2-image")
_SIZES = {"source_dim": SOURCE, "target_dim": WIDTH, "model_dim": MODEL, "num_layers": LAYERS, "num_heads": HEADS}
_VALUES = {name: getattr(_IMAGE_CASE, name) for name in Case.__dataclass_fields__}
CASES = (
    WithAdapter(
        **_VALUES
        | {
            "name": "anima",
            "family": "anima",
            "full": False,
            "in_folders": False,
            "convert": None,
            "native": replace(
                _IMAGE_CASE.native or Native(IMAGE, _conditioning, (16, 1, 8, 6)),
                conditioning=_conditioning,
                detected=cosmos_predict2.DETECTED | {"modules": {"comfy.ldm.anima.model.LLMAdapter": _SIZES}},
            ),
        }
    ),
)
