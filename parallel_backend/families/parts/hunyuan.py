"""What the HunyuanVideo models and HunyuanImage, one class in ComfyUI, share: blocks, key layout, text conditioning.

Key layouts: ComfyUI's, Tencent's and diffusers'.
"""

from typing import Any

import torch

from ..base.blocks import BlockList, Blocks
from ..base.family import CacheScope, cached
from ..base.step_inputs import Config, Shapes, StepInputs, image_tables
from . import flux_blocks
from .conditioning import count_blocks, hidden, text
from .key_map import BOTH, KeyMap

NEXT_TIME = "next_time"
"""Conditioning tensor [B] float32 of models that were trained for mean flow (arXiv 2505.13447): the time of the next step.
Absent: the sampler's time is none of its schedule's, and the model gets that time alone, as in ComfyUI."""
TIME_OPTIONS = ("sigmas", "sample_sigmas")
"""Inputs.options of those models: the noise level of the call, and those of all steps."""
REFINER = "txt_in.individual_token_refiner.blocks"
_REFINER = {
    "norm1": "norm1",
    "norm2": "norm2",
    "norm_out.linear": "adaLN_modulation.1",
    "attn.to_out.0": "self_attn.proj",
    "ff.net.0.proj": "mlp.0",
    "ff.net.2": "mlp.2",
}
_TENCENT = {  # endings of module names: Tencent's -> ComfyUI's, as in its supported_models.py
    **{f"{name}.mlp.0": f"{name}.in_layer" for name in ("time_in", "time_r_in", "guidance_in", "t_embedder")},
    **{f"{name}.mlp.2": f"{name}.out_layer" for name in ("time_in", "time_r_in", "guidance_in", "t_embedder")},
    **{f"c_embedder.linear_{index}": f"c_embedder.{kind}_layer" for index, kind in ((1, "in"), (2, "out"))},
    "_attn_qkv": "_attn.qkv",
    "_attn_proj": "_attn.proj",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.2",
    "_mod.linear": "_mod.lin",
    ".modulation.linear": ".modulation.lin",
}
ALIASES = {
    **{f"{theirs}.{name}": f"{ours}.{name}" for theirs, ours in _TENCENT.items() for name in BOTH},
    "_attn_q_norm.weight": "_attn.norm.query_norm.scale",
    "_attn_k_norm.weight": "_attn.norm.key_norm.scale",
    ".q_norm.weight": ".norm.query_norm.scale",
    ".k_norm.weight": ".norm.key_norm.scale",
    **flux_blocks.NORM_ALIASES,
}


def has_refiner(shapes: Shapes) -> bool:
    """Whether these are keys of a HunyuanVideo or a HunyuanImage."""
    return f"{REFINER}.0.norm1.weight" in shapes


def is_video_15(shapes: Shapes) -> bool:
    """Whether a model with these keys is HunyuanVideo 1.5."""
    return "vision_in.proj.0.weight" in shapes


def is_image(shapes: Shapes, sides: int) -> bool:
    """Whether these are keys of a HunyuanImage 2.1 on latents of `sides` axes: 2, or 3 for its refiner."""
    if not has_refiner(shapes) or is_video_15(shapes) or any(key.startswith("vector_in.") for key in shapes):
        return False
    return len(shapes["img_in.proj.weight"]) == 2 + sides


def block_list(name: str, rotary: str = "image_rotary_emb") -> BlockList:
    """A list of blocks. `rotary`: a block's argument for the rotary tables."""
    return BlockList(name, returns=("image", "text"), cuts={rotary: image_tables(0)}, needs_text=True)


BLOCKS = Blocks(
    lists=(block_list(flux_blocks.DOUBLE), block_list(flux_blocks.SINGLE)),
    counts=flux_blocks.block_counts,
    prologue=("x_embedder", "context_embedder"),
    epilogue=("norm_out", "proj_out"),
    text_first=False,
    residuals={"input": flux_blocks.DOUBLE, "output": flux_blocks.SINGLE},
    native=flux_blocks.NATIVE_BLOCKS,
    native_patches=("attn1_patch", "attn1_output_patch"),
)
"""Blocks of HunyuanImage without ByT5 text. Rows replace the fields in which their class differs."""


def cached_modules(time_embed: str) -> dict[str, CacheScope]:
    """`Forward.cached_modules`. `time_embed`: the class's name of its time embedding."""
    modulation = [f"*.{layer}" for layer in flux_blocks.DOUBLE_MODULATION | flux_blocks.SINGLE_MODULATION]
    call = (time_embed, "context_embedder", "norm_out.linear", *modulation)
    return cached(call, prompt=("rope", "context_embedder_2", "image_embedder"))


def sizes(shapes: Shapes) -> Config:
    """Constructor arguments that all classes have. `configure` refuses files without these tensors before it calls this."""
    width, channels = shapes["img_in.proj.weight"][:2]
    (head,) = shapes["double_blocks.0.img_attn.norm.query_norm.scale"]
    return {
        "in_channels": channels,
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "num_layers": count_blocks(shapes, "double_blocks."),
        "num_refiner_layers": count_blocks(shapes, f"{REFINER}."),
        "text_embed_dim": shapes["txt_in.input_embedder.weight"][1],
    }


def outside_keys(keys: KeyMap, config: Config, embedders: dict[str, str]) -> None:
    """Adds the modules around the blocks, with the text's refiner. `embedders`: see `embedder_keys`, without the
    refiner's."""
    refiner = {
        "context_embedder.time_text_embed.timestep_embedder": "txt_in.t_embedder",
        "context_embedder.time_text_embed.text_embedder": "txt_in.c_embedder",
    }
    flux_blocks.embedder_keys(keys, embedders | refiner)
    keys.copy({"x_embedder.proj": "img_in.proj", "context_embedder.proj_in": "txt_in.input_embedder"})
    keys.copy({"proj_out": "final_layer.linear"})
    keys.copy({"norm_out.linear": "final_layer.adaLN_modulation.1"}, swap_halves=True)
    for block in keys.each("context_embedder.token_refiner.refiner_blocks", REFINER, config["num_refiner_layers"]):
        block.copy(_REFINER)
        block.split("self_attn.qkv", dict.fromkeys(flux_blocks.QKV, hidden(config)))


def glyph_keys(keys: KeyMap) -> None:
    """Adds the layers for the ByT5 text."""
    glyphs = keys.inside("context_embedder_2.", "byt5_in.")
    glyphs.copy({"norm": "layernorm", "linear_1": "fc1", "linear_2": "fc2", "linear_3": "fc3"})


def unmasked_text(model: str, config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context` [B, T, text_embed_dim] of a model call and, if it has ByT5 text, `glyphs` [B, G, text_embed_2_dim].

    ValueError for a text with masked tokens: ComfyUI's encoder for these models makes none.
    """
    mask, tensors = call.get("attention_mask"), {"context": text(model, config["text_embed_dim"], call)}
    if mask is not None and not mask.bool().all():
        raise ValueError(
            f"positive, negative: the conditioning masks some of its tokens, which {model} cannot do on several devices. "
            "Encode the prompt with a CLIP Text Encode node made for it."
        )
    glyphs = call.get("txt_byt5")
    if glyphs is not None:
        if glyphs.shape[-1] != config["text_embed_2_dim"]:
            raise ValueError(
                f"positive, negative: the conditioning's ByT5 text has width {glyphs.shape[-1]}, this model needs "
                f"{config['text_embed_2_dim']}. Use the ByT5 encoder made for {model}."
            )
        tensors["glyphs"] = glyphs
    return tensors | _next_time(config, call, len(tensors["context"]))


def _next_time(config: Config, call: dict[str, Any], batch: int) -> dict[str, torch.Tensor]:
    """NEXT_TIME, for a model with mean flow."""
    now, levels = (call.get(name) for name in TIME_OPTIONS)
    if not config.get("use_meanflow") or call.get("disable_time_r") or now is None or levels is None:
        return {}
    places = (levels == now.flatten()[0].to(levels)).nonzero()
    if not len(places) or (following := int(places[0]) + 1) >= len(levels):
        return {}
    return {NEXT_TIME: levels[following].float().reshape(1).repeat(batch) * 1000.0}


def mean_flow(shapes: Shapes) -> bool:
    """Whether the model was trained for mean flow."""
    return "time_r_in.in_layer.weight" in shapes


def unmasked_arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    """Arguments of the forwards in models/hunyuan.py, which know no mask of the text."""
    return {
        "hidden_states": step.x,
        "timestep": step.timestep,
        "encoder_hidden_states": step.text_tensor("context", config["text_embed_dim"]),
        "encoder_hidden_states_2": step.tensors.get("glyphs"),
        "timestep_r": step.tensors.get(NEXT_TIME),
    }
