"""Key layout and conditioning of NextDiT, as Z-Image has it."""

from collections.abc import Iterator
from typing import Any

import torch

from ..base.file_layout import HeaderConfig
from ..base.step_inputs import Shapes
from ..base.tensor_plan import GATHER, LayerCut, LayerCuts
from .conditioning import count_blocks, text
from .key_map import WEIGHT, KeyMap

MODULATED, REFINER, CONTEXT = "layers", "noise_refiner", "context_refiner"
ACCEPTS = ("num_tokens", "attention_mask", "clip_text_pooled")
"""`Inputs.accepts`: ComfyUI's class gets these and does not use them. Captions come unpadded, so they need no mask."""
IGNORED = (r"norm_final\.weight",)
"""`FileLayout.ignored`: a norm that the original code never applies."""
AXES_LENS = (4096, 512, 512)
"""Positions in the class's tables, by axis: the caption's and then the image's index, token rows, token columns."""
MAX_SETTINGS = {"axes_lens": 1 << 16}
HEADER = HeaderConfig({"image_model": lambda _config: ("lumina2", "z_image")}, others=True)
"""Ming-Image's files have the same keys and name their model in the header."""


def tensor_plan(block: dict[str, LayerCut], modulation: str) -> LayerCuts:
    """Tensor plan of all lists. `block`: of a block without modulation, as the caption's refiners are."""
    return {**dict.fromkeys((MODULATED, REFINER), block | {modulation: GATHER}), CONTEXT: block}


def has_keys(shapes: Shapes, modulation: str) -> bool:
    """Whether these are a NextDiT's keys. `modulation`: the layer of a block that tells the two models apart."""
    needed = ("cap_embedder.1.weight", "noise_refiner.0.attention.k_norm.weight", f"layers.0.{modulation}.weight")
    return all(key in shapes for key in needed)


def sizes(shapes: Shapes) -> dict[str, int]:
    """Sizes that both classes have, under neutral names: the classes name them differently."""
    width, caption = shapes["cap_embedder.1.weight"]
    head = shapes["layers.0.attention.q_norm.weight"][0]
    return {
        "width": width,
        "caption": caption,
        "head": head,
        "heads": width // head,
        "key_heads": (shapes["layers.0.attention.qkv.weight"][0] - width) // head // 2,
        "channels": shapes["x_embedder.weight"][1] // 4,
        "layers": count_blocks(shapes, "layers."),
        "refiners": count_blocks(shapes, "noise_refiner."),
    }


def block_keys(
    keys: KeyMap, layers: int, refiners: int, attention: str, queries: int, key_values: int
) -> Iterator[tuple[str, KeyMap]]:
    """Each block as (list, key map inside it), its attention added already.

    `attention`: diffusers' name of the module. `queries`, `key_values`: rows of those layers.
    """
    for name, count in ((MODULATED, layers), (REFINER, refiners), (CONTEXT, refiners)):
        for block in keys.each(name, name, count):
            widths = {"to_q": queries, "to_k": key_values, "to_v": key_values}
            block.split("attention.qkv", {f"{attention}.{layer}": width for layer, width in widths.items()}, WEIGHT)
            names = {"to_out.0": "out", "norm_q": "q_norm", "norm_k": "k_norm"}
            block.copy({f"{attention}.{ours}": f"attention.{theirs}" for ours, theirs in names.items()}, WEIGHT)
            yield name, block


def caption(model: str, config: dict[str, Any], longest: int, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context` [B, T, cap_feat_dim] of a model call; ValueError without one, or for T above `longest`."""
    context = text(model, config["cap_feat_dim"], call)
    if context.shape[1] > longest:
        raise ValueError(
            f"positive, negative: the prompt has {context.shape[1]} tokens, this model's positions end at {longest}. Use a "
            "shorter prompt."
        )
    return {"context": context}
