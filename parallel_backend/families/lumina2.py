"""Lumina-Image 2.0: refiners for image and caption, then single-stream blocks; joint sequence [text, image].

Key layouts: Alpha-VLLM's (which ComfyUI's files use) and diffusers' Lumina2Transformer2DModel.
"""

from typing import Any

import torch

from .base.blocks import IMAGE, JOINT, BlockList, Blocks
from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed, cached
from .base.file_layout import FileLayout, Source
from .base.segments import text_then_image
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN, COLUMN_BY_HEADS, COLUMN_BY_KEY_HEADS, ROW, ROW_BY_HEADS
from .parts import next_dit
from .parts.epsilons import UNNAMED
from .parts.key_map import WEIGHT, KeyMap

MODULATION = "norm1.linear"
_OUTSIDE = {  # diffusers module <- original module
    "x_embedder": "x_embedder",
    "time_caption_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_caption_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_caption_embed.caption_embedder.1": "cap_embedder.1",
    "norm_out.linear_1": "final_layer.adaLN_modulation.1",
    "norm_out.linear_2": "final_layer.linear",
}
_BLOCK = {
    "feed_forward.linear_1": "feed_forward.w1",
    "feed_forward.linear_2": "feed_forward.w2",
    "feed_forward.linear_3": "feed_forward.w3",
    "norm2": "attention_norm2",
    "ffn_norm1": "ffn_norm1",
    "ffn_norm2": "ffn_norm2",
}
_PLAN = {
    "attn.to_q": COLUMN_BY_HEADS,
    **dict.fromkeys(("attn.to_k", "attn.to_v"), COLUMN_BY_KEY_HEADS),
    "attn.to_out.0": ROW_BY_HEADS,
    **dict.fromkeys(("feed_forward.linear_1", "feed_forward.linear_3"), COLUMN),
    "feed_forward.linear_2": ROW,
}


def _configure(shapes: Shapes) -> Config:
    size = next_dit.sizes(shapes)
    sides = size["head"] // 3 // 2 * 2  # rotary axes are (32, 32, 32) of a head's 96
    return {
        "in_channels": size["channels"],
        "hidden_size": size["width"],
        "num_layers": size["layers"],
        "num_refiner_layers": size["refiners"],
        "num_attention_heads": size["heads"],
        "num_kv_heads": size["key_heads"],
        # The class rounds 4 times the model's width up to a multiple of this, which gives the feed-forward's width again.
        "multiple_of": shapes["layers.0.feed_forward.w1.weight"][0],
        "axes_dim_rope": (size["head"] - 2 * sides, sides, sides),
        "axes_lens": next_dit.AXES_LENS,
        "cap_feat_dim": size["caption"],
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys, width = KeyMap(), config["hidden_size"]
    keys.copy(_OUTSIDE)
    keys.copy({"time_caption_embed.caption_embedder.0": "cap_embedder.0"}, WEIGHT)
    key_values = width // config["num_attention_heads"] * config["num_kv_heads"]
    layers, refiners = config["num_layers"], config["num_refiner_layers"]
    for name, block in next_dit.block_keys(keys, layers, refiners, "attn", width, key_values):
        block.copy(_BLOCK | {"norm1" if name == next_dit.CONTEXT else "norm1.norm": "attention_norm1"}, WEIGHT)
        if name != next_dit.CONTEXT:
            block.copy({MODULATION: "adaLN_modulation.1"})
    return keys.sources


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    words = step.text_tensor("context", config["cap_feat_dim"])
    return {
        "hidden_states": step.x,
        "timestep": step.timestep,
        "encoder_hidden_states": words,
        "encoder_attention_mask": words.new_ones(words.shape[:2], dtype=torch.bool),
    }


def _blocks(name: str, joined: bool) -> BlockList:
    return BlockList(
        name,
        returns=("image",),
        joined=joined,
        cuts={"image_rotary_emb": lambda table, rows: rows.of_joint(table, 1) if joined else rows.of_image(table, 1)},
        attention={"attn": JOINT if joined else IMAGE},
        prologue=not joined,
    )


LUMINA2 = Family(
    name="lumina2",
    model_class="Lumina2Transformer2DModel",
    native_classes=("Lumina2",),
    file=FileLayout(
        detect=lambda shapes: next_dit.has_keys(shapes, "adaLN_modulation.1"),
        configure=_configure,
        key_map=_key_map,
        ignored=next_dit.IGNORED,
        header=next_dit.HEADER,
        max_settings={**next_dit.MAX_SETTINGS, "sample_size": 512},
    ),
    blocks=Blocks(
        lists=(_blocks(next_dit.REFINER, joined=False), _blocks(next_dit.MODULATED, joined=True)),
        counts=lambda config: {next_dit.MODULATED: config["num_layers"]},
        prologue=("x_embedder", next_dit.CONTEXT),
        epilogue=("norm_out",),
        native_patches=("noise_refiner", "double_block"),
        segments=text_then_image,
    ),
    sizes=Sizes(
        latent_channels=lambda config: config["in_channels"],
        hidden=lambda config: config["hidden_size"],
        key_heads=lambda config: config["num_kv_heads"],
        head_size=lambda config: config["hidden_size"] // config["num_attention_heads"],
        max_side=lambda config: min(config["axes_lens"][1:]),
    ),
    inputs=Inputs(
        conditioning=lambda config, call: next_dit.caption("Lumina 2", config, config["axes_lens"][0] - 1, call),
        accepts=next_dit.ACCEPTS,
        token_tensors=("context",),
        example=lambda config, tokens: {"context": torch.randn(1, tokens, config["cap_feat_dim"])},
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        time_embed=TimeEmbed("time_caption_embed.time_proj", model_time=lambda timestep: 1 - timestep),
        output=lambda out: -out,
        cached_modules=cached(
            call=("time_caption_embed", "*.norm1.linear", "norm_out.linear_1"), prompt=(f"{next_dit.CONTEXT}.*",)
        ),
    ),
    tensor_plan=next_dit.tensor_plan(_PLAN, MODULATION),
    epsilons=UNNAMED,
)
