"""Anima: Cosmos Predict2's case for pictures, and for ComfyUI an adapter that the text passes first."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from parallel_backend.families.anima import ADAPTER
from testing.cases import cosmos_predict2
from testing.cases.case import Case

IMAGE = cosmos_predict2.IMAGE
Sizes = dict[str, int]
SMALL = {"source_dim": 12, "target_dim": IMAGE["text_embed_dim"], "model_dim": 16, "num_layers": 2, "num_heads": 2}
"""Of the adapter: arguments of ComfyUI's class."""
OF_CLASS = {"source_dim": 1024, "target_dim": 1024, "model_dim": 1024, "num_layers": 6, "num_heads": 16}
"""Those that it has on ranks, where nothing takes the place of its own."""
VOCABULARY = 32128
"""T5's, which ComfyUI's class takes for granted."""


@dataclass(frozen=True)
class WithAdapter(Case):
    sizes: Sizes = field(default_factory=lambda: SMALL)

    def save(self, model, path: Path, config=None) -> Path:
        """With the adapter, which tells the file from Cosmos Predict2's."""
        save_file(load_file(super().save(model, path, config)) | adapter(self.sizes), path)
        return path


def adapter(sizes: Sizes) -> dict[str, torch.Tensor]:
    """Random weights, by their keys in a file."""
    generator = torch.Generator().manual_seed(7)
    width, model, head = sizes["target_dim"], sizes["model_dim"], sizes["model_dim"] // sizes["num_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCABULARY, width),
        "out_proj.weight": (width, model),
        "out_proj.bias": (width,),
        "norm.weight": (width,),
    }
    if model != width:
        shapes |= {"in_proj.weight": (model, width), "in_proj.bias": (model,)}
    for layer in range(sizes["num_layers"]):
        block = f"blocks.{layer}."
        for attention, source in (("self_attn", model), ("cross_attn", sizes["source_dim"])):
            for part, channels in (("q", model), ("k", source), ("v", source), ("o", model)):
                shapes[f"{block}{attention}.{part}_proj.weight"] = (model, channels)
            shapes |= {f"{block}{attention}.{part}_norm.weight": (head,) for part in "qk"}
        shapes |= {f"{block}{norm}.weight": (model,) for norm in ("norm_self_attn", "norm_cross_attn", "norm_mlp")}
        shapes |= {f"{block}mlp.0.weight": (4 * model, model), f"{block}mlp.0.bias": (4 * model,)}
        shapes |= {f"{block}mlp.2.weight": (model, 4 * model), f"{block}mlp.2.bias": (model,)}
    values = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    return {f"{ADAPTER}{name}": value + ("norm" in name) for name, value in values.items()}


def _case(sizes: Sizes) -> Case:
    image = next(case for case in cosmos_predict2.CASES if case.name == "cosmos-predict2-image")
    width = sizes["target_dim"]

    def conditioning(generator):
        """The language model's output, T5's tokens of the same prompt, and their weights."""
        ids = torch.randint(0, VOCABULARY, (9,), generator=generator)
        extras = {"t5xxl_ids": ids, "t5xxl_weights": 1 + torch.rand(9, generator=generator) / 2}
        return torch.randn(1, 7, sizes["source_dim"], generator=generator), extras

    assert image.native is not None
    detected = cosmos_predict2.DETECTED | {"crossattn_emb_channels": width}
    if sizes is not OF_CLASS:
        detected |= {"modules": {"comfy.ldm.anima.model.LLMAdapter": sizes}}
    native = replace(image.native, config=IMAGE | {"text_embed_dim": width}, conditioning=conditioning, detected=detected)
    values = {name: getattr(image, name) for name in Case.__dataclass_fields__}
    others = {"name": "anima", "family": "anima", "full": False, "in_folders": False, "convert": None, "native": native}
    return WithAdapter(**values | others, sizes=sizes)


def at_the_classes_sizes() -> Case:
    """For ComfyUI's own class on ranks. Its file has 0.5 GB."""
    return _case(OF_CLASS)


CASES = (_case(SMALL),)
