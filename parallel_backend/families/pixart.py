"""PixArt-alpha (with the picture's size and aspect ratio as conditioning, and without) and PixArt-Sigma.

Key layouts: the authors' PixArtMS (which ComfyUI's files use) and diffusers' PixArtTransformer2DModel, named
Transformer2DModel in folders of older versions. Positions are the authors' and diffusers': at any size they fill the square
that the model was trained with.
"""

import math
from typing import Any

import torch

from .base.blocks import Blocks
from .base.family import Family, Forward, Inputs, Sizes, cached
from .base.file_layout import FileLayout, FolderLayout, Source
from .base.step_inputs import Config, Shapes, StepInputs
from .parts.conditioning import check_learned_variance, count_blocks, hidden, text, without_variance
from .parts.cross_attention import TEXT_KEYS, block_list, block_plan
from .parts.key_map import BOTH, WEIGHT, KeyMap

HEAD = 72
"""Width of a head in every model of this family. Nothing in the weights shows it."""
SAMPLE = 128
"""Side of the latent for which positions are made, if the file does not show it. All multiples of 64 give the same."""
BLOCKS = "transformer_blocks"
UNUSED = ("pos_embed", r"y_embedder\.y_embedding")
"""`FileLayout.ignored`: a table of positions, which the class computes, and the text of prompts dropped in training."""
EMBEDDER = {"timestep_embedder": "t_embedder"}
NEEDED = ("t_block.1.weight", "blocks.0.cross_attn.kv_linear.weight", "blocks.0.mlp.fc1.weight")
SIZE_EMBEDDERS = {"resolution_embedder": "csize_embedder", "aspect_ratio_embedder": "ar_embedder"}


def _configure(shapes: Shapes) -> Config:
    width, channels, patch, _ = shapes["x_embedder.proj.weight"]
    return {
        "num_attention_heads": width // HEAD,
        "attention_head_dim": HEAD,
        "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // patch**2,
        "num_layers": count_blocks(shapes, "blocks."),
        "cross_attention_dim": width,
        "attention_bias": True,
        "sample_size": patch * math.isqrt(shapes["pos_embed"][-2]) if "pos_embed" in shapes else SAMPLE,
        "patch_size": patch,
        "use_additional_conditions": "ar_embedder.mlp.0.weight" in shapes,
        "caption_channels": shapes["y_embedder.y_proj.fc1.weight"][1],
    }


def _knows_sizes(config: Config) -> bool:
    """Whether the picture's size is conditioning. For a folder without this entry the rule of diffusers' class holds."""
    stated = config["use_additional_conditions"]
    return config["sample_size"] == 128 if stated is None else stated


def _key_map(config: Config) -> dict[str, Source]:
    check_learned_variance("PixArt", config["out_channels"] == 2 * config["in_channels"])
    keys, width = KeyMap(), hidden(config)
    keys.copy({"pos_embed.proj": "x_embedder.proj", "adaln_single.linear": "t_block.1", "proj_out": "final_layer.linear"})
    for target, source in (EMBEDDER | (SIZE_EMBEDDERS if _knows_sizes(config) else {})).items():
        keys.copy({f"adaln_single.emb.{target}.linear_{index}": f"{source}.mlp.{2 * index - 2}" for index in (1, 2)})
    keys.copy({f"caption_projection.linear_{index}": f"y_embedder.y_proj.fc{index}" for index in (1, 2)})
    keys.tensor("scale_shift_table", "final_layer.scale_shift_table")
    for block in keys.each(BLOCKS, "blocks", config["num_layers"]):
        block.tensor("scale_shift_table")
        block.split("attn.qkv", {f"attn1.to_{part}": width for part in "qkv"}, BOTH if config["attention_bias"] else WEIGHT)
        block.split("cross_attn.kv_linear", {f"attn2.to_{part}": width for part in "kv"})
        block.copy({"attn1.to_out.0": "attn.proj", "attn2.to_q": "cross_attn.q_linear", "attn2.to_out.0": "cross_attn.proj"})
        block.copy({"ff.net.0.proj": "mlp.fc1", "ff.net.2": "mlp.fc2"})
    return keys.sources


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context` [B, T, caption_channels], and if the model takes them `resolution` [B, 2] and `aspect_ratio` [B, 1].

    No mask: ComfyUI's native model attends to all of the text.
    """
    tensors = {"context": text("PixArt", config["caption_channels"], call)}
    return tensors | ({"resolution": call["c_size"], "aspect_ratio": call["c_ar"]} if _knows_sizes(config) else {})


def _example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    tensors = {"context": torch.randn(1, text_tokens, config["caption_channels"])}
    return tensors | ({"resolution": torch.ones(1, 2), "aspect_ratio": torch.ones(1, 1)} if _knows_sizes(config) else {})


def _arguments(step: StepInputs, _config: Config) -> dict[str, Any]:
    return {
        "hidden_states": step.x,
        "encoder_hidden_states": step.tensors["context"],
        "timestep": step.timestep,
        "added_cond_kwargs": {name: step.tensors.get(name) for name in ("resolution", "aspect_ratio")},
    }


PIXART = Family(
    name="pixart",
    model_class="PixArtTransformer2DModel",
    native_classes=("PixArtAlpha", "PixArtSigma"),
    file=FileLayout(
        detect=lambda shapes: all(key in shapes for key in NEEDED),
        configure=_configure,
        key_map=_key_map,
        ignored=UNUSED,
        max_settings={"sample_size": 512},
        folder=FolderLayout(
            takes=lambda config: config.get("norm_type", "ada_norm_single") == "ada_norm_single",
            older_class="Transformer2DModel",
        ),
    ),
    blocks=Blocks(
        lists=(block_list(BLOCKS),),
        counts=lambda config: {BLOCKS: config["num_layers"]},
        prologue=("pos_embed",),
        epilogue=("norm_out", "proj_out"),
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=("c_size", "c_ar"),
        vector_tensors=("context", "resolution", "aspect_ratio"),
        exact=("resolution", "aspect_ratio"),
        example=_example,
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        output=without_variance,
        cached_modules=cached(call=("adaln_single",), prompt=("caption_projection",)) | TEXT_KEYS,
    ),
    half_dtypes=lambda _config: ("fp16", "bf16"),
    tensor_plan={BLOCKS: block_plan("ff")},
)
