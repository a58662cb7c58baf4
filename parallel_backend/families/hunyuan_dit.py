"""HunyuanDiT 1.0, 1.1 and 1.2: CLIP's and T5's text by cross-attention, long skips from block i to block L - 1 - i.

Key layouts: Tencent's HunYuanDiT (which ComfyUI's files use) and diffusers' HunyuanDiT2DModel.

Outputs of blocks that later blocks still read cross to the next pipeline stage with the hidden states: in the middle of the
model L/2 - 1 tensors of the same size (19 of 40 blocks), one less for each block towards either end.
"""

from typing import Any

import torch

from .base.blocks import JOINT, BlockList, Blocks
from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed, cached
from .base.file_layout import FileLayout, Source
from .base.step_inputs import Config, Shapes, StepInputs, image_tables
from .base.tensor_plan import GATHER
from .parts.conditioning import check_learned_variance, count_blocks, rotary_table, text, without_variance
from .parts.cross_attention import TEXT_KEYS, block_plan
from .parts.key_map import WEIGHT, KeyMap

TRAINED = 32
"""Token rows and columns of the 512 x 512 picture to which positions are scaled."""

_TEXTS = ("text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5")
_ACCEPTS = (*_TEXTS, "image_meta_size")
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
        "mlp_ratio": (shapes["blocks.0.mlp.fc1.weight"][0] + 0.5) / width,  # the class truncates the product
        "learn_sigma": shapes["final_layer.linear.weight"][0] == 2 * channels * patch**2,
        "cross_attention_dim": words,
        "cross_attention_dim_t5": shapes["mlp_t5.0.weight"][1],
        "pooled_projection_dim": shapes["pooler.c_proj.weight"][0],
        "text_len": tokens - t5_tokens,
        "text_len_t5": t5_tokens,
        "use_style_cond_and_image_meta_size": "style_embedder.weight" in shapes,
    }


def _key_map(config: Config) -> dict[str, Source]:
    check_learned_variance("HunyuanDiT", config["learn_sigma"])
    keys, width = KeyMap(), config["hidden_size"]
    keys.copy(_OUTSIDE)
    keys.copy({"norm_out.linear": "final_layer.adaLN_modulation.1"}, swap_halves=True)
    keys.tensor("text_embedding_padding")
    keys.tensor("time_extra_emb.pooler.positional_embedding", "pooler.positional_embedding")
    if config["use_style_cond_and_image_meta_size"]:
        keys.copy({"time_extra_emb.style_embedder": "style_embedder"}, WEIGHT)
    for index, block in enumerate(keys.each("blocks", "blocks", config["num_layers"])):
        block.copy(_BLOCK)
        block.split("attn1.Wqkv", {f"attn1.to_{part}": width for part in "qkv"})
        block.split("attn2.kv_proj", {f"attn2.to_{part}": width for part in "kv"})
        if index > config["num_layers"] // 2:
            block.same("skip_norm", "skip_linear")
    return keys.sources


class _BlockList(BlockList):
    def skips(self, done: int, count: int) -> int:
        """Blocks L/2 + 1, L/2 + 2 ... L - 1 read the outputs of blocks L/2 - 2, L/2 - 3 ... 0."""
        return max(0, min(done - 1, count // 2 - 1) - max(0, done - count // 2 - 1))


class _Forward(Forward):
    weight_readers = ("time_extra_emb.pooler",)


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """CLIP's `context` [B, text_len, cross_attention_dim], T5's `encoder_hidden_states_t5` [B, text_len_t5, ...], a mask [B,
    T] of each, and `image_meta_size` [B, 6] if the model takes it.

    ValueError for texts of other lengths, since the class has a learned padding vector for each position.
    """
    context = text("HunyuanDiT", config["cross_attention_dim"], call)
    if any(name not in call for name in _TEXTS):
        raise ValueError(
            "positive, negative: this conditioning lacks T5's text or a mask, which HunyuanDiT needs. Encode the prompt "
            "with the CLIP of a HunyuanDiT checkpoint."
        )
    tensors = {"context": context, **{name: call[name] for name in _TEXTS}}
    lengths = context.shape[1], tensors["encoder_hidden_states_t5"].shape[1]
    if lengths != (needed := (config["text_len"], config["text_len_t5"])):
        raise ValueError(
            f"positive, negative: the prompt has {lengths[0]} tokens of CLIP and {lengths[1]} of T5, this model takes "
            f"{needed[0]} and {needed[1]}. Shorten it, and do not concatenate conditionings."
        )
    known = config["use_style_cond_and_image_meta_size"]
    return tensors | ({"image_meta_size": call["image_meta_size"]} if known else {})


def _example(config: Config, _text_tokens: int) -> dict[str, torch.Tensor]:
    words, t5_words = config["text_len"], config["text_len_t5"]
    tensors = {
        "context": torch.randn(1, words, config["cross_attention_dim"]),
        "text_embedding_mask": torch.ones(1, words, dtype=torch.bool),
        "encoder_hidden_states_t5": torch.randn(1, t5_words, config["cross_attention_dim_t5"]),
        "text_embedding_mask_t5": torch.ones(1, t5_words, dtype=torch.bool),
    }
    return tensors | ({"image_meta_size": torch.ones(1, 6)} if config["use_style_cond_and_image_meta_size"] else {})


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    tensors = step.tensors
    return {
        "hidden_states": step.x,
        "timestep": step.timestep.to(step.dtype),  # only its dtype is read: TimeEmbed passes the float32 value
        "encoder_hidden_states": tensors["context"],
        **{name: tensors.get(name) for name in _ACCEPTS},
        "style": torch.zeros(len(step.timestep), dtype=torch.long, device=step.timestep.device),  # there is one style
        "image_rotary_emb": _rotary(step, config),
    }


def _rotary(step: StepInputs, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [N, head]. The picture is scaled, in its proportions, to fit the middle of the trained square.

    From Tencent's posemb_layers.py (get_fill_resize_and_crop, get_meshgrid). diffusers' table differs for other shapes.
    """
    positions = step.of_tokens("positions", lambda _image: _positions(*step.grid))
    table = rotary_table(positions, (config["attention_head_dim"] // 2,) * 2, 10000.0)
    return table.real.repeat_interleave(2, 1), table.imag.repeat_interleave(2, 1)


def _positions(rows: int, columns: int) -> torch.Tensor:
    """[N, 2]: column, row. Columns rotate the first half of a head."""
    tall = rows > columns
    used = (TRAINED, round(TRAINED / rows * columns)) if tall else (round(TRAINED / columns * rows), TRAINED)
    sides = [
        round((TRAINED - part) / 2) + torch.arange(count, dtype=torch.float64) * part / count
        for count, part in zip((rows, columns), used, strict=True)
    ]
    return torch.cartesian_prod(*sides).flip(1).float()


HUNYUAN_DIT = Family(
    name="hunyuan-dit",
    model_class="HunyuanDiT2DModel",
    native_classes=("HunyuanDiT", "HunyuanDiT1"),
    file=FileLayout(
        detect=lambda shapes: "mlp_t5.0.weight" in shapes and "blocks.0.attn1.Wqkv.weight" in shapes,
        configure=_configure,
        key_map=_key_map,
        max_settings={"sample_size": 512, "text_len": 1 << 16, "text_len_t5": 1 << 16},
    ),
    blocks=Blocks(
        lists=(
            _BlockList("blocks", returns=("image",), attention={"attn1": JOINT}, cuts={"image_rotary_emb": image_tables(0)}),
        ),
        counts=lambda config: {"blocks": config["num_layers"]},
        # No prologue: the forward reads the patch size from the patch embedding on every stage.
        epilogue=("norm_out", "proj_out"),
        native={"double_block": "blocks"},
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=_ACCEPTS,
        vector_tensors=("context", *_ACCEPTS),
        exact=("image_meta_size",),
        example=_example,
    ),
    forward=_Forward(
        arguments=_arguments,
        whole_latent=True,
        time_embed=TimeEmbed("time_extra_emb"),
        output=without_variance,
        cached_modules=cached(call=("time_extra_emb", "*.norm1.linear", "norm_out.linear"), prompt=("text_embedder",))
        | TEXT_KEYS,
    ),
    half_dtypes=lambda _config: ("fp16", "bf16"),
    tensor_plan={"blocks": block_plan("ff", norms=False) | dict.fromkeys(("norm1.linear", "skip_linear"), GATHER)},
)
