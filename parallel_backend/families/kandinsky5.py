"""Kandinsky 5: video (Lite and Pro, text or a first picture to video) and image. They differ in their latents.

The text runs through separate blocks, which every rank computes once per call, and is read by cross-attention. Key layout:
Kandinsky's, which diffusers' Kandinsky5Transformer3DModel has too. The class is models/kandinsky5.py.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange

from .base.blocks import JOINT, BlockList, Blocks, Values
from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed, cached
from .base.file_layout import FileLayout, FolderLayout, Source
from .base.patching import Patching
from .base.segments import text_then_image
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN, COLUMN_BY_HEADS, GATHER, ROW, ROW_BY_HEADS
from .parts.conditioning import count_blocks, example, text_and_pooled
from .parts.key_map import WEIGHT, KeyMap
from .parts.rope import OPTION, rope_tensors

VISUAL, TEXT = "visual_transformer_blocks", "text_transformer_blocks"
PRO_VIDEO, LARGE = 4096, 14080
"""Width of the Pro video model, and the latent's rows times columns from which on its positions are scaled more."""
_LOADER = "DualCLIPLoader of type kandinsky5 or kandinsky5_image"
_QKV = ("to_query", "to_key", "to_value")
_TEXT_KEYS = tuple(f"*.cross_attention.{layer}" for layer in ("to_key", "to_value", "key_norm"))


def _configure(shapes: Shapes) -> Config:
    width, patch = shapes["visual_embeddings.in_layer.weight"]
    (head,) = shapes[f"{VISUAL}.0.self_attention.query_norm.weight"]
    out = shapes["out_layer.out_layer.weight"][0] // 4
    return {
        "in_visual_dim": out,
        "out_visual_dim": out,
        "visual_cond": patch != 4 * out,
        "in_text_dim": shapes["text_embeddings.in_layer.weight"][1],
        "in_text_dim2": shapes["pooled_text_embeddings.in_layer.weight"][1],
        "time_dim": shapes["time_embeddings.in_layer.weight"][0],
        "model_dim": width,
        "ff_dim": shapes[f"{VISUAL}.0.feed_forward.in_layer.weight"][0],
        "num_text_blocks": count_blocks(shapes, f"{TEXT}."),
        "num_visual_blocks": count_blocks(shapes, f"{VISUAL}."),
        "axes_dims": (head // 4, head * 3 // 8, head * 3 // 8),  # (16, 24, 24) of 64 and (32, 48, 48) of 128
        "patch_size": (1, 2, 2),
    }


def _key_map(config: Config) -> dict[str, Source]:
    if tuple(config["patch_size"]) != (1, 2, 2):
        raise ValueError(
            f"model_name: this Kandinsky 5 has patches of {config['patch_size']}, which this version cannot run."
        )
    keys = KeyMap()
    keys.same(*(f"time_embeddings.{layer}" for layer in ("in_layer", "out_layer")))
    keys.same(
        *(f"{name}.{layer}" for name in ("text_embeddings", "pooled_text_embeddings") for layer in ("in_layer", "norm"))
    )
    keys.same("visual_embeddings.in_layer", "out_layer.modulation.out_layer", "out_layer.out_layer")
    parts = {
        TEXT: (config["num_text_blocks"], "text_modulation", ("self_attention",)),
        VISUAL: (config["num_visual_blocks"], "visual_modulation", ("self_attention", "cross_attention")),
    }
    for name, (count, modulation, attentions) in parts.items():
        for block in keys.each(name, name, count):
            block.same(f"{modulation}.out_layer")
            block.same("feed_forward.in_layer", "feed_forward.out_layer", parameters=WEIGHT)
            for attention in attentions:
                block.same(*(f"{attention}.{layer}" for layer in (*_QKV, "out_layer")))
                block.same(f"{attention}.query_norm", f"{attention}.key_norm", parameters=WEIGHT)
    return keys.sources


def _widths(config: Config) -> tuple[int, int]:
    return config["in_text_dim"], config["in_text_dim2"]


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context`, `pooled`; `start` [B, C, t, H, W], which replaces the latent's first frames; `unscaled` [B] bool, whose
    presence means that positions are not scaled."""
    tensors = text_and_pooled("Kandinsky 5", _LOADER, _widths(config), call)
    start = call.get("time_dim_replace")
    tensors |= rope_tensors(call) | ({} if start is None else {"start": start})
    if call.get(OPTION) is not None:  # any rope options replace the scale of ComfyUI's class
        tensors["unscaled"] = torch.ones(len(tensors["context"]), dtype=torch.bool)
    return tensors


def _check_grid(grid: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> None:
    if "start" not in tensors:
        return
    frames, *sides = VIDEO_PATCHING.grid(tuple(tensors["start"].shape))
    if frames > grid[0] or tuple(sides) != grid[1:]:
        raise ValueError("positive, negative: the first pictures' latent has another size than the video's, or more frames.")


def _positions(step: StepInputs, config: Config) -> torch.Tensor:
    """[n, 3] float32: positions of the rank's tokens, as ComfyUI scales them."""
    if not config["visual_cond"] or "unscaled" in step.tensors:
        return step.positions()
    rows, columns = step.grid[-2:]
    divisor = 3.16 if config["model_dim"] == PRO_VIDEO and 4 * rows * columns >= LARGE else 2.0
    frames, sides = step.positions().split((1, 2), dim=1)
    return torch.cat((frames, sides / divisor), dim=1)


def _with_start(tokens: torch.Tensor, start: torch.Tensor, step: StepInputs) -> torch.Tensor:
    """The rank's tokens [b, n, 4 C], with `start` in place of the first frames' latent; further channels stay."""
    frames = start.shape[2]
    packed = VIDEO_PATCHING.cut(step.token_order.along).pack(F.pad(start, (0, 0, 0, 0, 0, step.grid[0] - frames)))
    replaced = packed[:, step.token_order.images(step.image).slice].to(tokens)
    pictures = frames * math.prod(step.grid[1:])
    first = step.of_tokens("first frames", lambda image: step.places_in_class(image) < pictures)
    width = replaced.shape[-1]
    return torch.cat((torch.where(first[:, None], replaced, tokens[..., :width]), tokens[..., width:]), dim=-1)


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    tokens = step.x
    if tokens is not None:
        if "start" in step.tensors:
            tokens = _with_start(tokens, step.tensors["start"], step)
        tokens = rearrange(tokens, "b n (c p) -> b n (p c)", p=4)
    return {
        "hidden_states": tokens,
        "encoder_hidden_states": step.tensors["context"],
        "timestep": step.timestep,
        "pooled_projections": step.tensors["pooled"],
        "positions": _positions(step, config),
    }


def _plan(modulation: str, *attentions: str) -> dict:
    return {
        **{f"{attention}.{layer}": COLUMN_BY_HEADS for attention in attentions for layer in _QKV},
        **{f"{attention}.out_layer": ROW_BY_HEADS for attention in attentions},
        "feed_forward.in_layer": COLUMN,
        "feed_forward.out_layer": ROW,
        f"{modulation}.out_layer": GATHER,
    }


VIDEO_PATCHING = Patching(video=True)


def _family(name: str, native: str, video: bool) -> Family:
    def takes(config: Config) -> bool:
        return bool(config.get("visual_cond")) == video

    return Family(
        name=name,
        model_class="Kandinsky5Transformer3DModel",
        class_module="parallel_backend.families.models.kandinsky5",
        native_classes=(native,),
        file=FileLayout(
            detect=lambda shapes: f"{VISUAL}.0.cross_attention.key_norm.weight" in shapes and takes(_configure(shapes)),
            configure=_configure,
            key_map=_key_map,
            max_settings={"num_text_blocks": 1 << 8, "num_visual_blocks": 1 << 10},
            folder=FolderLayout(takes),
        ),
        blocks=Blocks(
            lists=(
                BlockList(
                    VISUAL,
                    returns=("image",),
                    attention={"self_attention": JOINT},
                    values=Values(image="to_value", query="to_query"),
                ),
            ),
            counts=lambda config: {VISUAL: config["num_visual_blocks"]},
            prologue=("visual_embeddings",),
            epilogue=("out_layer",),
            native={"double_block": VISUAL},
            segments=text_then_image,
        ),
        sizes=Sizes(
            latent_channels=lambda config: (
                config["in_visual_dim"] * (2 if config["visual_cond"] else 1) + config["visual_cond"]
            ),
            hidden=lambda config: config["model_dim"],
            heads=lambda config: config["model_dim"] // sum(config["axes_dims"]),
            head_size=lambda config: sum(config["axes_dims"]),
        ),
        inputs=Inputs(
            conditioning=_conditioning,
            accepts=("y", "attention_mask", *(("time_dim_replace",) if video else ())),  # ComfyUI's class ignores the mask
            options=(OPTION,),
            vector_tensors=("context", "pooled", "start", "unscaled"),
            example=lambda config, tokens: example(_widths(config), tokens),
            check_grid=_check_grid,
        ),
        forward=Forward(
            arguments=_arguments,
            time_embed=TimeEmbed("time_embeddings"),
            cached_modules=cached(
                call=("time_embeddings", f"{TEXT}.*", "*.visual_modulation", *_TEXT_KEYS, "out_layer.modulation"),
                prompt=("text_embeddings", "pooled_text_embeddings"),
            ),
        ),
        tensor_plan={
            VISUAL: _plan("visual_modulation", "self_attention", "cross_attention"),
            TEXT: _plan("text_modulation", "self_attention"),
        },
        patching=VIDEO_PATCHING if video else Patching(),
    )


KANDINSKY5_VIDEO = _family("kandinsky-5-video", "Kandinsky5", video=True)
KANDINSKY5_IMAGE = _family("kandinsky-5-image", "Kandinsky5Image", video=False)
