"""CogVideoX 1.0 (2b, 5b) and 1.5 (text to video, picture to video): one list of joint blocks, joint sequence [text, image].

Key layouts: ComfyUI's and diffusers' CogVideoXTransformer3DModel. Positions are those of the authors and of diffusers'
pipelines. ComfyUI 0.33 has other positions for 1.0: it stretches 5b's by 1.875 and makes 2b's rotary.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from .base.blocks import JOINT, BlockList, Blocks
from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed, cached
from .base.file_layout import FileLayout, FolderLayout, Source
from .base.patching import Patching
from .base.segments import text_then_image
from .base.step_inputs import Config, Shapes, StepInputs, image_tables
from .base.tensor_plan import COLUMN, COLUMN_BY_HEADS, GATHER, ROW, ROW_BY_HEADS
from .parts.conditioning import count_blocks, rotary_table, text
from .parts.key_map import KeyMap

BLOCKS = "transformer_blocks"
HEADS_OF_2B = 30
"""Attention heads of 2b, the only model whose positions are added instead of rotary. Its other weights do not show it."""
TRAINED = {"sample_height": 60, "sample_width": 90, "max_text_seq_length": 226}
"""Latent rows, latent columns and text tokens of the 1.0 models' training, to which their positions are scaled."""
VIDEO_SIZE, MAX_VIDEO = ("sample_height", "sample_width", "sample_frames"), 1 << 23
"""Settings that give the size of a video for which the constructor makes positions, and their largest accepted product."""
PROJECTION, TABLE = "patch_embed.proj.weight", "patch_embed.pos_embedding"

_BLOCK = {  # diffusers module <- original module
    **{f"attn1.to_{part}": part for part in "qkv"},
    **{f"attn1.norm_{part}": f"norm_{part}" for part in "qk"},
    "attn1.to_out.0": "attn_out",
    "ff.net.0.proj": "ff_proj",
    "ff.net.2": "ff_out",
}
_PLAN = {
    **dict.fromkeys(("norm1.linear", "norm2.linear"), GATHER),
    **dict.fromkeys(("attn1.to_q", "attn1.to_k", "attn1.to_v"), COLUMN_BY_HEADS),
    "attn1.to_out.0": ROW_BY_HEADS,
    "ff.net.0.proj": COLUMN,
    "ff.net.2": ROW,
}


def _embeds_by(dimensions: int, shapes: Shapes) -> bool:
    """Whether the patch embedding's weight has `dimensions` axes: 4 in 1.0 (convolution), 2 in 1.5 (linear layer)."""
    return "blocks.0.norm1.linear.weight" in shapes and len(shapes.get(PROJECTION, ())) == dimensions


def _configure(shapes: Shapes) -> Config:
    projection, (width, words) = shapes[PROJECTION], shapes["patch_embed.text_proj.weight"]
    (head,) = shapes["blocks.0.norm_q.weight"]
    frames = 1 if len(projection) == 4 else 2
    return {
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "in_channels": projection[1] if frames == 1 else projection[1] // (4 * frames),
        "out_channels": shapes["proj_out.weight"][0] // (4 * frames),
        "time_embed_dim": shapes["blocks.0.norm1.linear.weight"][1],
        "ofs_embed_dim": shapes.get("ofs_embedding_linear_1.weight", (None,))[0],
        "text_embed_dim": words,
        "num_layers": count_blocks(shapes, "blocks."),
        "attention_bias": True,
        "patch_size_t": None if frames == 1 else frames,
        "use_rotary_positional_embeddings": width // head != HEADS_OF_2B,
        "use_learned_positional_embeddings": TABLE in shapes,
        **TRAINED,
    }


def _key_map(config: Config) -> dict[str, Source]:
    if config.get("use_learned_positional_embeddings"):
        raise ValueError(
            "model_name: this CogVideoX has a table of positions (5b-I2V 1.0), which ComfyUI and diffusers use differently. "
            "Use CogVideoX 1.5 I2V, or a native loader."
        )
    keys = KeyMap()
    keys.same("patch_embed.proj", "patch_embed.text_proj", "norm_final", "norm_out.linear", "norm_out.norm", "proj_out")
    for name in ("time", "ofs") if config["ofs_embed_dim"] else ("time",):
        keys.copy({f"{name}_embedding.linear_{index}": f"{name}_embedding_linear_{index}" for index in (1, 2)})
    for block in keys.each(BLOCKS, "blocks", config["num_layers"]):
        block.copy(_BLOCK)
        block.same("norm1.linear", "norm1.norm", "norm2.linear", "norm2.norm")
    return keys.sources


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    context = text("CogVideoX", config["text_embed_dim"], call)
    needed = config["max_text_seq_length"]
    if not config["use_rotary_positional_embeddings"] and context.shape[1] != needed:
        raise ValueError(
            f"positive, negative: the prompt has {context.shape[1]} tokens, this model needs {needed}. Encode a shorter one "
            "with a CLIPLoader of type cogvideox, which fills it up to that."
        )
    return {"context": context} | ({"ofs": call["ofs"]} if config["ofs_embed_dim"] else {})


def _example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    tokens = text_tokens if config["use_rotary_positional_embeddings"] else config["max_text_seq_length"]
    offset = {"ofs": torch.full((1,), 2.0)} if config["ofs_embed_dim"] else {}
    return {"context": torch.randn(1, tokens, config["text_embed_dim"])} | offset


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    return {
        "hidden_states": step.image_tensor().transpose(1, 2),
        "encoder_hidden_states": step.text_tensor("context", config["text_embed_dim"]),
        "timestep": step.timestep,
        "ofs": step.tensors.get("ofs"),
        "image_rotary_emb": _rotary(step, config) if config["use_rotary_positional_embeddings"] else None,
    }


def _sides(grid: tuple[int, ...], config: Config) -> list[torch.Tensor]:
    """Positions along frames, rows, columns. In 1.0 a video is scaled, in its proportions, into the middle of TRAINED's
    grid.

    From diffusers' pipeline_cogvideox.py: get_resize_crop_region_for_grid, and get_3d_rotary_pos_embed's grid types.
    """
    frames, rows, columns = grid
    if config["patch_size_t"] is not None:
        return [torch.arange(float(size)) for size in grid]
    height, width = (config["sample_height"] // 2, config["sample_width"] // 2)
    tall = rows / columns > height / width
    used = (height, round(height / rows * columns)) if tall else (round(width / columns * rows), width)
    sides = [torch.arange(float(frames))]
    for count, whole, part in zip((rows, columns), (height, width), used, strict=True):
        start = round((whole - part) / 2)
        sides.append(torch.linspace(start, (start + part) * (count - 1) / count, count))
    return sides


def _rotary(step: StepInputs, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [N, head] of all image tokens, in the class's order."""
    head = config["attention_head_dim"]
    positions = step.of_tokens("positions", lambda _image: torch.cartesian_prod(*_sides(step.grid, config)))
    table = rotary_table(positions, (head // 4, head // 8 * 3, head // 8 * 3), 10000.0)
    return table.real.repeat_interleave(2, 1), table.imag.repeat_interleave(2, 1)


class _FileLayout(FileLayout):
    def check_together(self, name: str, settings: Mapping[str, Any]) -> None:
        """Limits the video for which the constructor makes positions."""
        video = [settings[side] for side in VIDEO_SIZE if isinstance(settings.get(side), int)]
        if math.prod(video) > MAX_VIDEO:
            raise ValueError(f"model_name: {name} says that it was made for videos of {' x '.join(map(str, video))}.")


COGVIDEOX = Family(
    name="cogvideox",
    model_class="CogVideoXTransformer3DModel",
    native_classes=("CogVideoX_T2V", "CogVideoX_I2V", "CogVideoX_Inpaint"),
    file=_FileLayout(
        detect=lambda shapes: _embeds_by(4, shapes),
        configure=_configure,
        key_map=_key_map,
        max_settings={"sample_height": 512, "sample_width": 512, "sample_frames": 256, "max_text_seq_length": 1 << 16},
        folder=FolderLayout(takes=lambda config: config.get("patch_size_t") is None),
    ),
    blocks=Blocks(
        lists=(
            BlockList(
                BLOCKS,
                returns=("image", "text"),
                cuts={"image_rotary_emb": image_tables(0)},
                attention={"attn1": JOINT},
            ),
        ),
        counts=lambda config: {BLOCKS: config["num_layers"]},
        prologue=("patch_embed",),
        epilogue=("norm_final", "norm_out", "proj_out"),
        segments=text_then_image,
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=("ofs",),
        token_tensors=("context",),
        vector_tensors=("ofs",),
        example=_example,
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        time_embed=TimeEmbed("time_proj"),
        output=lambda out: out.transpose(1, 2),
        cached_modules=cached(
            call=("time_embedding", "*.norm1.linear", "*.norm2.linear", "norm_out.linear"),
            prompt=("patch_embed.text_proj", "ofs_embedding"),
        ),
    ),
    half_dtypes=lambda _config: ("bf16", "fp16"),
    tensor_plan={BLOCKS: _PLAN},
    patching=Patching(video=True),
    native_values=lambda config: {"in_channels": config["in_channels"], "ofs_proj_dim": config["ofs_embed_dim"]},
)
COGVIDEOX_15 = replace(
    COGVIDEOX,
    name="cogvideox-1.5",
    file=replace(
        COGVIDEOX.file,
        detect=lambda shapes: _embeds_by(2, shapes),
        folder=FolderLayout(takes=lambda config: config.get("patch_size_t") == 2),
    ),
    patching=Patching(frames=2, video=True),
)
