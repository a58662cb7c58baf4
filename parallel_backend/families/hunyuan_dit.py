"""HunyuanDiT 1.1 (and 1.0, its twin) and 1.2: CLIP's and T5's text by cross attention, long skips from block i to L - 1 - i.

Key layouts: Tencent's HunYuanDiT (which ComfyUI's files use) and diffusers' HunyuanDiT2DModel.

Between pipeline stages the outputs of blocks that later ones still want travel with the hidden states: beside those, L/2 - 1
more of their size in the middle of the model (19 of 40 blocks), one less for each block towards either end.
"""

from parallel_backend.families.base.family import Family, Source
from parallel_backend.families.base.step_inputs import Config, Shapes
from parallel_backend.families.base.tensor_plan import GATHER
from parallel_backend.families.parts.conditioning import check_learned_variance, count_blocks, without_variance
from parallel_backend.families.parts.cross_attention import block_list, block_plan
from parallel_backend.families.parts.key_map import Keys

from . import hunyuan_dit_inputs

_OUTSIDE = {  # diffusers module <- original module
    "pos_embed.proj": "x_embedder.proj",
    **{f"time_extra_emb.timestep_embedder.linear_{index}": f"t_embedder.mlp.{2 * index - 2}" for index in (1, 2)},
    **{f"time_extra_emb.extra_embedder.linear_{index}": f"extra_embedder.{2 * index - 2}" for index in (1, 2)},
    **{f"time_extra_emb.pooler.{part}_proj": f"pooler.{part}_proj" for part in "qkvc"},
    **{f"text_embedder.linear_{index}": f"mlp_t5.{2 * index - 2}" for index in (1, 2)},
    "proj_out": "final_layer.linear",
}
_BLOCK = {
    "norm1.norm": "norm1",
    "norm1.linear": "default_modulation.1",
    "norm2": "norm3",
    "norm3": "norm2",
    "ff.net.0.proj": "mlp.fc1",
    "ff.net.2": "mlp.fc2",
    **{f"attn{attention}.norm_{part}": f"attn{attention}.{part}_norm" for attention in (1, 2) for part in "qk"},
    **{f"attn{attention}.to_out.0": f"attn{attention}.out_proj" for attention in (1, 2)},
    "attn2.to_q": "attn2.q_proj",
}


def _configure(shapes: Shapes) -> Config:
    width, channels, patch, _ = shapes["x_embedder.proj.weight"]
    (head,) = shapes["blocks.0.attn1.q_norm.weight"]
    t5_tokens = shapes["pooler.positional_embedding"][0] - 1
    tokens, words = shapes["text_embedding_padding"]
    return {
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "in_channels": channels,
        "patch_size": patch,
        "hidden_size": width,
        "num_layers": count_blocks(shapes, "blocks."),
        "mlp_ratio": (shapes["blocks.0.mlp.fc1.weight"][0] + 0.5) / width,  # of which the class takes the whole part
        "learn_sigma": shapes["final_layer.linear.weight"][0] == 2 * channels * patch**2,
        "cross_attention_dim": words,
        "cross_attention_dim_t5": shapes["mlp_t5.0.weight"][1],
        "pooled_projection_dim": shapes["pooler.c_proj.weight"][0],
        "text_len": tokens - t5_tokens,
        "text_len_t5": t5_tokens,
        "use_style_cond_and_image_meta_size": "style_embedder.weight" in shapes,
    }


def _recipe(config: Config) -> dict[str, Source]:
    check_learned_variance("HunyuanDiT", config["learn_sigma"])
    keys, width = Keys(), config["hidden_size"]
    keys.copy(_OUTSIDE)
    keys.copy({"norm_out.linear": "final_layer.adaLN_modulation.1"}, swap_halves=True)
    keys.tensor("text_embedding_padding")
    keys.tensor("time_extra_emb.pooler.positional_embedding", "pooler.positional_embedding")
    if config["use_style_cond_and_image_meta_size"]:
        keys.copy({"time_extra_emb.style_embedder": "style_embedder"}, ("weight",))
    for index in range(config["num_layers"]):
        block = keys.inside(f"blocks.{index}.", f"blocks.{index}.")
        block.copy(_BLOCK)
        block.split("attn1.Wqkv", {f"attn1.to_{part}": width for part in "qkv"})
        block.split("attn2.kv_proj", {f"attn2.to_{part}": width for part in "kv"})
        if index > config["num_layers"] // 2:
            block.same("skip_norm", "skip_linear")
    return keys.sources


def _skips(done: int, count: int) -> int:
    """Blocks 0 ... L/2 - 2 give their output to blocks L - 1 ... L/2 + 1, the last one first."""
    return max(0, min(done - 1, count // 2 - 1) - max(0, done - count // 2 - 1))


HUNYUAN_DIT = Family(
    name="hunyuan-dit",
    model_class="HunyuanDiT2DModel",
    block_lists=(
        block_list(
            "blocks",
            cuts={"image_rotary_emb": lambda tables, rows: tuple(rows.of_image(table, 0) for table in tables)},
            skips=_skips,
        ),
    ),
    prologue=(),  # the class asks its small patch embedding for the patch size at the end
    epilogue=("norm_out", "proj_out"),
    token_tensors=(),
    vector_tensors=hunyuan_dit_inputs.TENSORS,
    time_embed=("time_extra_emb", 1.0),
    latent_channels=lambda config: config["in_channels"],
    blocks=lambda config: {"blocks": config["num_layers"]},
    tensor_plan={"blocks": block_plan("ff", norms=False) | dict.fromkeys(("norm1.linear", "skip_linear"), GATHER)},
    detect=lambda shapes: "mlp_t5.0.weight" in shapes and "blocks.0.attn1.Wqkv.weight" in shapes,
    configure=_configure,
    recipe=_recipe,
    arguments=hunyuan_dit_inputs.arguments,
    conditioning=hunyuan_dit_inputs.conditioning,
    example=hunyuan_dit_inputs.example,
    whole_latent=True,
    accepts=hunyuan_dit_inputs.ACCEPTED,
    exact=("image_meta_size",),
    output=without_variance,
)
