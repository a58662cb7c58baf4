"""Stable Diffusion 3 and 3.5 (medium with its second attention, large): joint blocks, joint sequence [image, text].

Key layouts: Stability AI's MMDiT (which ComfyUI's files use) and diffusers' SD3Transformer2DModel.
"""

import math
from typing import Any

from .base.blocks import IMAGE, JOINT, BlockList, Blocks
from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed, cached
from .base.file_layout import FileLayout, Source
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN, COLUMN_BY_HEADS, GATHER, ROW, ROW_BY_HEADS
from .parts.conditioning import count_blocks, example, hidden, joint_widths, text_and_pooled
from .parts.key_map import WEIGHT, KeyMap

HEAD = 64
"""Width of a head in every model of this family. The weights show it only where there are query norms."""
BLOCKS = "transformer_blocks"

_OUTSIDE = {  # diffusers module <- original module
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "context_embedder": "context_embedder",
    "pos_embed.proj": "x_embedder.proj",
    "proj_out": "final_layer.linear",
}
_IMAGE_QKV, _TEXT_QKV = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
_COLUMNS = [f"attn.{name}" for name in _IMAGE_QKV + _TEXT_QKV] + [f"attn2.{name}" for name in _IMAGE_QKV]
_PLAN = {
    **dict.fromkeys(("norm1.linear", "norm1_context.linear"), GATHER),
    **dict.fromkeys(_COLUMNS, COLUMN_BY_HEADS),
    **dict.fromkeys(("attn.to_out.0", "attn.to_add_out", "attn2.to_out.0"), ROW_BY_HEADS),
    **dict.fromkeys(("ff.net.0.proj", "ff_context.net.0.proj"), COLUMN),
    **dict.fromkeys(("ff.net.2", "ff_context.net.2"), ROW),
}
_LOADER = "TripleCLIPLoader, or a DualCLIPLoader of type sd3"
_NEEDED = ("joint_blocks.0.context_block.adaLN_modulation.1.weight", "x_embedder.proj.weight", "pos_embed")


def _configure(shapes: Shapes) -> Config:
    width, channels, patch, _ = shapes["x_embedder.proj.weight"]
    norm = shapes.get("joint_blocks.0.x_block.attn.ln_q.weight")
    head = HEAD if norm is None else norm[0]
    layers = count_blocks(shapes, "joint_blocks.")
    return {
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // patch**2,
        "num_layers": layers,
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "caption_projection_dim": shapes["context_embedder.weight"][0],
        "pooled_projection_dim": shapes["y_embedder.mlp.0.weight"][1],
        "pos_embed_max_size": math.isqrt(shapes["pos_embed"][1]),
        "dual_attention_layers": tuple(i for i in range(layers) if f"joint_blocks.{i}.x_block.attn2.qkv.weight" in shapes),
        "qk_norm": None if norm is None else "rms_norm",
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    keys.tensor("pos_embed.pos_embed", "pos_embed")
    keys.copy(_OUTSIDE)
    keys.copy({"norm_out.linear": "final_layer.adaLN_modulation.1"}, swap_halves=True)
    for index in range(config["num_layers"]):
        # In the last block text only gives keys and values: no layers follow its attention, and its modulation has no gates.
        ends = index == config["num_layers"] - 1
        block, joint = f"{BLOCKS}.{index}.", f"joint_blocks.{index}."
        image, text = keys.inside(block, f"{joint}x_block."), keys.inside(block, f"{joint}context_block.")
        image.copy({"norm1.linear": "adaLN_modulation.1", "ff.net.0.proj": "mlp.fc1", "ff.net.2": "mlp.fc2"})
        text.copy({"norm1_context.linear": "adaLN_modulation.1"}, swap_halves=ends)
        _attention(image, config, "attn", _IMAGE_QKV, ("norm_q", "norm_k"), "to_out.0")
        _attention(text, config, "attn", _TEXT_QKV, ("norm_added_q", "norm_added_k"), None if ends else "to_add_out")
        if not ends:
            text.copy({"ff_context.net.0.proj": "mlp.fc1", "ff_context.net.2": "mlp.fc2"})
        if index in config["dual_attention_layers"]:
            _attention(image, config, "attn2", _IMAGE_QKV, ("norm_q", "norm_k"), "to_out.0")
    return keys.sources


def _attention(
    keys: KeyMap, config: Config, name: str, qkv: tuple[str, ...], norms: tuple[str, str], out: str | None
) -> None:
    keys.split(f"{name}.qkv", {f"{name}.{part}": hidden(config) for part in qkv})
    if config["qk_norm"] is not None:
        original = (f"{name}.ln_q", f"{name}.ln_k")
        keys.copy(dict(zip((f"{name}.{norm}" for norm in norms), original, strict=True)), WEIGHT)
    keys.copy({f"{name}.{out}": f"{name}.proj"} if out else {})


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    return {
        "hidden_states": step.x,
        "encoder_hidden_states": step.text_tensor("context", config["joint_attention_dim"]),
        "pooled_projections": step.tensors["pooled"],
        "timestep": step.timestep,
    }


SD3 = Family(
    name="sd3",
    model_class="SD3Transformer2DModel",
    native_classes=("SD3",),
    file=FileLayout(
        detect=lambda shapes: all(key in shapes for key in _NEEDED),
        configure=_configure,
        key_map=_key_map,
        max_settings={"pos_embed_max_size": 1024, "sample_size": 512},
    ),
    blocks=Blocks(
        lists=(BlockList(BLOCKS, attention={"attn": JOINT, "attn2": IMAGE}),),
        counts=lambda config: {BLOCKS: config["num_layers"]},
        prologue=("pos_embed", "context_embedder"),
        epilogue=("norm_out", "proj_out"),
        text_first=False,
        residuals={"output": BLOCKS},
        native={"double_block": BLOCKS},
    ),
    sizes=Sizes(
        latent_channels=lambda config: config["in_channels"],
        max_side=lambda config: config["pos_embed_max_size"],
    ),
    inputs=Inputs(
        conditioning=lambda config, call: text_and_pooled("SD3", _LOADER, joint_widths(config), call),
        token_tensors=("context",),
        vector_tensors=("pooled",),
        example=lambda config, tokens: example(joint_widths(config), tokens),
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        time_embed=TimeEmbed("time_text_embed"),
        cached_modules=cached(
            call=("time_text_embed", "context_embedder", "*.norm1.linear", "*.norm1_context.linear", "norm_out.linear")
        ),
    ),
    half_dtypes=lambda _config: ("fp16", "bf16"),
    tensor_plan={BLOCKS: _PLAN},
)
