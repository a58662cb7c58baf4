"""HunyuanVideo's key layouts: ComfyUI's, in which blocks are named as in Flux, and Tencent's, whose names are aliases."""

from parallel_backend.families.base.family import Source
from parallel_backend.families.base.step_inputs import Config
from parallel_backend.families.base.tensor_plan import GATHER
from parallel_backend.families.parts.conditioning import hidden
from parallel_backend.families.parts.flux_blocks import (
    DOUBLE,
    DOUBLE_PLAN,
    FEED_FORWARD,
    NORM_ALIASES,
    QKV,
    SINGLE,
    SINGLE_PLAN,
    double_keys,
    single_keys,
)
from parallel_backend.families.parts.key_map import Keys

REFINER = "txt_in.individual_token_refiner.blocks."
MODULATION = {"norm1.linear": "img_mod.lin", "norm1_context.linear": "txt_mod.lin"}
SINGLE_MODULATION = {"norm.linear": "modulation.lin"}
PLAN = {
    DOUBLE: DOUBLE_PLAN | dict.fromkeys(MODULATION, GATHER),
    SINGLE: SINGLE_PLAN | dict.fromkeys(SINGLE_MODULATION, GATHER),
}

_EMBEDDERS = {  # diffusers module <- original module, of two layers each
    "time_text_embed.timestep_embedder": "time_in",
    "time_text_embed.text_embedder": "vector_in",
    "context_embedder.time_text_embed.timestep_embedder": "txt_in.t_embedder",
    "context_embedder.time_text_embed.text_embedder": "txt_in.c_embedder",
}
_GUIDANCE = {"time_text_embed.guidance_embedder": "guidance_in"}
_OUTSIDE = {
    "x_embedder.proj": "img_in.proj",
    "context_embedder.proj_in": "txt_in.input_embedder",
    "proj_out": "final_layer.linear",
}
_REFINER = {
    "norm1": "norm1",
    "norm2": "norm2",
    "norm_out.linear": "adaLN_modulation.1",
    "attn.to_out.0": "self_attn.proj",
    "ff.net.0.proj": "mlp.0",
    "ff.net.2": "mlp.2",
}
_TENCENT = {  # ends of modules' names: Tencent's -> ComfyUI's, as its supported_models.py has them
    **{f"{name}.mlp.0": f"{name}.in_layer" for name in ("time_in", "guidance_in", "t_embedder")},
    **{f"{name}.mlp.2": f"{name}.out_layer" for name in ("time_in", "guidance_in", "t_embedder")},
    "c_embedder.linear_1": "c_embedder.in_layer",
    "c_embedder.linear_2": "c_embedder.out_layer",
    "_attn_qkv": "_attn.qkv",
    "_attn_proj": "_attn.proj",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.2",
    "_mod.linear": "_mod.lin",
    ".modulation.linear": ".modulation.lin",
}
ALIASES = {
    **{f"{theirs}.{leaf}": f"{ours}.{leaf}" for theirs, ours in _TENCENT.items() for leaf in ("weight", "bias")},
    "_attn_q_norm.weight": "_attn.norm.query_norm.scale",
    "_attn_k_norm.weight": "_attn.norm.key_norm.scale",
    ".q_norm.weight": ".norm.query_norm.scale",
    ".k_norm.weight": ".norm.key_norm.scale",
    **NORM_ALIASES,
}


def recipe(config: Config) -> dict[str, Source]:
    """ValueError for what diffusers' class computes otherwise than ComfyUI's."""
    if config.get("image_condition_type") == "token_replace":
        raise ValueError(
            "model_name: this folder's config.json says token_replace, which ComfyUI computes otherwise than diffusers. Use "
            "an I2V model that takes the picture in its channels (latent_concat), or a native loader."
        )
    keys = Keys()
    for ours, theirs in (_EMBEDDERS | (_GUIDANCE if config["guidance_embeds"] else {})).items():
        keys.copy({f"{ours}.linear_1": f"{theirs}.in_layer", f"{ours}.linear_2": f"{theirs}.out_layer"})
    keys.copy(_OUTSIDE)
    keys.copy({"norm_out.linear": "final_layer.adaLN_modulation.1"}, swap_halves=True)
    for index in range(config["num_refiner_layers"]):
        block = keys.inside(f"context_embedder.token_refiner.refiner_blocks.{index}.", f"{REFINER}{index}.")
        block.copy(_REFINER)
        block.split("self_attn.qkv", dict.fromkeys(QKV, hidden(config)))
    double_keys(keys, config, FEED_FORWARD | MODULATION)
    single_keys(keys, config, SINGLE_MODULATION)
    return keys.sources
