"""Cosmos Predict2: text to image, and a first picture to video, where each frame has its time.

Key layouts: NVIDIA's (which ComfyUI's files use) and diffusers' CosmosTransformer3DModel. The forward is models/cosmos.py.
"""

from typing import Any

import torch

from .base.blocks import Blocks
from .base.family import Family, Forward, Inputs, Sizes, cached
from .base.file_layout import FileLayout, Source
from .base.patching import Patching
from .base.segments import text_then_image
from .base.step_inputs import Config, Rows, Shapes, StepInputs, image_tables
from .base.tensor_plan import GATHER
from .parts.conditioning import count_blocks, text
from .parts.cross_attention import TEXT_KEYS, block_list, block_plan
from .parts.epsilons import COSMOS
from .parts.key_map import WEIGHT, KeyMap

NAME, BLOCKS = "Cosmos Predict2", "transformer_blocks"
MAX_SIZE = (128, 240, 240)
"""Frames, rows and columns of the largest latent."""
_ROPE_SCALES = {(17, 2048): (1.0, 3.0, 3.0), (17, 5120): (5 / 6, 2.0, 2.0)}
"""(input channels, width) -> factor by which positions are stretched, by axis, in the video models, as in ComfyUI."""
_IMAGE_SCALE, _NO_SCALE = (1.0, 4.0, 4.0), (1.0, 1.0, 1.0)
_MODULATION = {"norm1": "self_attn", "norm2": "cross_attn", "norm3": "mlp"}
_ATTENTION = {
    **{f"to_{part}": f"{part}_proj" for part in "qkv"},
    **{f"norm_{part}": f"{part}_norm" for part in "qk"},
    "to_out.0": "output_proj",
}


def _configure(shapes: Shapes) -> Config:
    width, patch = shapes["x_embedder.proj.1.weight"]
    (head,) = shapes["blocks.0.self_attn.q_norm.weight"]
    channels = patch // 4 - 1
    return {
        "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // 4,
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "num_layers": count_blocks(shapes, "blocks."),
        "mlp_ratio": shapes["blocks.0.mlp.layer1.weight"][0] / width,
        "text_embed_dim": shapes["blocks.0.cross_attn.k_proj.weight"][1],
        "adaln_lora_dim": shapes["blocks.0.adaln_modulation_mlp.1.weight"][0],
        "max_size": MAX_SIZE,
        "patch_size": (1, 2, 2),
        "rope_scale": _IMAGE_SCALE if channels == 16 else _ROPE_SCALES.get((channels, width), _NO_SCALE),
        "concat_padding_mask": True,
        "extra_pos_embed_type": None,
    }


def _key_map(config: Config) -> dict[str, Source]:
    """ValueError for another Cosmos, which has the same class in diffusers."""
    others = ("use_crossattn_projection", "img_context_dim_in", "controlnet_block_every_n", "extra_pos_embed_type")
    other = next((name for name in others if config.get(name)), None)
    if other is not None or not config["concat_padding_mask"] or tuple(config["patch_size"]) != (1, 2, 2):
        raise ValueError(f"model_name: this is another Cosmos than Predict2 ({other or 'other patches'}).")
    keys = KeyMap()
    outside = {
        "patch_embed.proj": "x_embedder.proj.1",
        "time_embed.norm": "t_embedding_norm",
        **{f"time_embed.t_embedder.linear_{index}": f"t_embedder.1.linear_{index}" for index in (1, 2)},
        **{f"norm_out.linear_{index}": f"final_layer.adaln_modulation.{index}" for index in (1, 2)},
        "proj_out": "final_layer.linear",
    }
    keys.copy(outside, WEIGHT)
    for block in keys.each(BLOCKS, "blocks", config["num_layers"]):
        for norm, part in _MODULATION.items():
            block.copy({f"{norm}.linear_{layer}": f"adaln_modulation_{part}.{layer}" for layer in (1, 2)}, WEIGHT)
        for attention, part in (("attn1", "self_attn"), ("attn2", "cross_attn")):
            block.copy({f"{attention}.{ours}": f"{part}.{theirs}" for ours, theirs in _ATTENTION.items()}, WEIGHT)
        block.copy({"ff.net.0.proj": "mlp.layer1", "ff.net.2": "mlp.layer2"}, WEIGHT)
    return keys.sources


def _arguments(step: StepInputs, _config: Config) -> dict[str, Any]:
    return {"hidden_states": step.x, "timestep": step.timestep, "encoder_hidden_states": step.tensors["context"]}


def _of_tokens(value: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Cut of a modulation [b, width], or with a time for each frame [b, n, width]."""
    return rows.of_image(value, 1) if value.ndim == 3 else value


COSMOS_PREDICT2 = Family(
    name="cosmos-predict2",
    model_class="CosmosTransformer3DModel",
    class_module="parallel_backend.families.models.cosmos",
    native_classes=("CosmosT2IPredict2", "CosmosI2VPredict2"),
    file=FileLayout(
        detect=lambda shapes: "blocks.0.mlp.layer1.weight" in shapes,  # behind Anima, whose files have these layers too
        configure=_configure,
        key_map=_key_map,
        ignored=(r"pos_embedder\..*", r"accum_.*", r".*\._extra_state"),  # in NVIDIA's files
    ),
    blocks=Blocks(
        lists=(
            block_list(
                BLOCKS,
                cuts={"image_rotary_emb": image_tables(0), "embedded_timestep": _of_tokens, "temb": _of_tokens},
            ),
        ),
        counts=lambda config: {BLOCKS: config["num_layers"]},
        prologue=("patch_embed",),
        epilogue=("norm_out", "proj_out"),
        native_patches=("attn1_patch", "attn2_patch", "mlp_patch", "post_input"),
        segments=text_then_image,
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"], max_side=lambda config: config["max_size"][-1] // 2),
    inputs=Inputs(
        conditioning=lambda config, call: {"context": text(NAME, config["text_embed_dim"], call)},
        accepts=("fps", "denoise_mask"),  # Predict2 ignores the rate; ComfyUI has made the frames' times
        vector_tensors=("context",),
        example=lambda config, tokens: {"context": torch.randn(1, tokens, config["text_embed_dim"])},
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        cached_modules=cached(call=("time_embed", "norm_out.linear_1", "norm_out.linear_2"), prompt=("rope",)) | TEXT_KEYS,
    ),
    tensor_plan={BLOCKS: block_plan("ff", norms=False) | {f"{norm}.linear_2": GATHER for norm in _MODULATION}},
    patching=Patching(video=True),
    epsilons=COSMOS,
)
