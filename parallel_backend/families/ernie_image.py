"""ERNIE-Image: single-stream blocks with one modulation for all of them, joint sequence [image, text].

Tokens are single latent pixels. On the axis on which text positions count words, the picture is at the text's length.
ComfyUI's files have diffusers' key layout. The class is diffusers' with the batch first (models/ernie_image.py).
"""

from typing import Any

import torch
import torch.nn.functional as F

from .base.blocks import JOINT, BlockList, Blocks
from .base.family import Family, Forward, Inputs, Sizes, cached
from .base.file_layout import FileLayout, Source
from .base.patching import Patching
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN, COLUMN_BY_HEADS, ROW, ROW_BY_HEADS
from .parts.conditioning import count_blocks, text
from .parts.key_map import WEIGHT, KeyMap
from .parts.rope import OPTION, rope_tensors

BLOCKS = "layers"
_PLAN = {
    **dict.fromkeys((f"self_attention.to_{part}" for part in "qkv"), COLUMN_BY_HEADS),
    "self_attention.to_out.0": ROW_BY_HEADS,
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), COLUMN),
    "mlp.linear_fc2": ROW,
}
_NORMS = ("adaLN_sa_ln", "adaLN_mlp_ln", "self_attention.norm_q", "self_attention.norm_k")
_NEEDED = ("x_embedder.proj.weight", f"{BLOCKS}.0.mlp.linear_fc2.weight", f"{BLOCKS}.0.adaLN_sa_ln.weight")
_EMBEDDERS = ("time_embedding.linear_1", "time_embedding.linear_2", "adaLN_modulation.1")


def _configure(shapes: Shapes) -> Config:
    width, channels, patch, _ = shapes["x_embedder.proj.weight"]
    (head,) = shapes[f"{BLOCKS}.0.self_attention.norm_q.weight"]
    sides = head * 3 // 8 // 2 * 2  # rotary axes are (32, 48, 48) of a head's 128
    return {
        "hidden_size": width,
        "num_attention_heads": width // head,
        "num_layers": count_blocks(shapes, f"{BLOCKS}."),
        "ffn_hidden_size": shapes[f"{BLOCKS}.0.mlp.linear_fc2.weight"][1],
        "in_channels": channels,
        "out_channels": shapes["final_linear.weight"][0] // patch**2,
        "patch_size": patch,
        "text_in_dim": shapes["text_proj.weight"][1] if "text_proj.weight" in shapes else width,
        "rope_axes_dim": (head - 2 * sides, sides, sides),
    }


def _key_map(config: Config) -> dict[str, Source]:
    if config["patch_size"] != 1:
        raise ValueError(f"model_name: this ERNIE-Image has patches of {config['patch_size']} latent pixels, others have 1.")
    keys = KeyMap()
    keys.same("x_embedder.proj", *_EMBEDDERS, "final_norm.linear", "final_linear")
    if config["text_in_dim"] != config["hidden_size"]:
        keys.same("text_proj", parameters=WEIGHT)
    for block in keys.each(BLOCKS, BLOCKS, config["num_layers"]):
        block.same(*_PLAN, *_NORMS, parameters=WEIGHT)
    return keys.sources


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    text_positions = F.pad(step.text_numbers[:, None], (0, 2))
    return {
        "hidden_states": step.image_tensor(),
        "timestep": step.timestep,
        "encoder_hidden_states": step.text_tensor("context", config["text_in_dim"]),
        "position_ids": torch.cat((step.positions(front=step.text_tokens), text_positions)),
    }


ERNIE_IMAGE = Family(
    name="ernie-image",
    model_class="ErnieImageTransformer2DModel",
    class_module="parallel_backend.families.models.ernie_image",
    native_classes=("ErnieImage",),
    file=FileLayout(detect=lambda shapes: all(key in shapes for key in _NEEDED), configure=_configure, key_map=_key_map),
    blocks=Blocks(
        lists=(BlockList(BLOCKS, returns=("image",), image="x", joined=True, attention={"self_attention": JOINT}),),
        counts=lambda config: {BLOCKS: config["num_layers"]},
        prologue=("x_embedder", "text_proj"),
        epilogue=("final_norm", "final_linear"),
        text_first=False,
    ),
    sizes=Sizes(
        latent_channels=lambda config: config["in_channels"],
        hidden=lambda config: config["hidden_size"],
        head_size=lambda config: config["hidden_size"] // config["num_attention_heads"],
    ),
    inputs=Inputs(
        conditioning=lambda config, call: {"context": text("ERNIE-Image", config["text_in_dim"], call)} | rope_tensors(call),
        accepts=(),
        options=(OPTION,),
        token_tensors=("context",),
        example=lambda config, tokens: {"context": torch.randn(1, tokens, config["text_in_dim"])},
    ),
    forward=Forward(
        arguments=_arguments,
        cached_modules=cached(call=("time_embedding", "adaLN_modulation", "final_norm.linear"), band=("pos_embed",)),
    ),
    tensor_plan={BLOCKS: _PLAN},
    patching=Patching(side=1),
)
