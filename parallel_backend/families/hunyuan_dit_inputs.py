"""What HunyuanDiT's class is called with: two texts, the picture's size, positions."""

from typing import Any

import torch

from parallel_backend.families.base.step_inputs import Config, StepInputs
from parallel_backend.families.parts.conditioning import rotary_table, text

TRAINED = 32
"""Token rows and columns of the 512 x 512 picture that positions are made for."""
TEXTS = ("text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5")
ACCEPTED = (*TEXTS, "image_meta_size")
TENSORS = ("context", *ACCEPTED)


def _rotary(step: StepInputs, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [N, head]: the picture fills the middle of the trained square, in its own proportions.

    From Tencent's posemb_layers.py (get_fill_resize_and_crop, get_meshgrid); diffusers' table differs where it is no square.
    """
    rows, columns = step.grid
    tall = rows > columns
    used = (TRAINED, round(TRAINED / rows * columns)) if tall else (round(TRAINED / columns * rows), TRAINED)
    sides = [
        round((TRAINED - part) / 2) + torch.arange(count, dtype=torch.float64) * part / count
        for count, part in zip(step.grid, used, strict=True)
    ]
    positions = torch.cartesian_prod(*sides).flip(1).float()  # columns come first in a head
    table = rotary_table(positions.to(step.timestep.device), (config["attention_head_dim"] // 2,) * 2, 10000.0)
    return table.real.repeat_interleave(2, 1), table.imag.repeat_interleave(2, 1)


def arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    tensors = step.tensors
    return {
        "hidden_states": step.x,
        "timestep": step.timestep.to(step.dtype),  # whose dtype is that of its embedding; its value gets there exact
        "encoder_hidden_states": tensors["context"],
        **{name: tensors.get(name) for name in ACCEPTED},
        "style": torch.zeros(len(step.timestep), dtype=torch.long, device=step.timestep.device),  # there is but one
        "image_rotary_emb": _rotary(step, config),
    }


def conditioning(config: Config, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context` [B, text_len, cross_attention_dim] of CLIP, `encoder_hidden_states_t5` [B, text_len_t5, ...], a mask of each
    [B, T], and where the model knows it `image_meta_size` [B, 6].

    ValueError for texts of other lengths: the class has a padding for each token.
    """
    context = text("HunyuanDiT", config["cross_attention_dim"], given)
    if any(name not in given for name in TEXTS):
        raise ValueError(
            "positive, negative: this conditioning lacks T5's text or a mask, which HunyuanDiT needs. Encode the prompt "
            "with the CLIP of a HunyuanDiT checkpoint."
        )
    tensors = {"context": context, **{name: given[name] for name in TEXTS}}
    lengths = context.shape[1], tensors["encoder_hidden_states_t5"].shape[1]
    if lengths != (needed := (config["text_len"], config["text_len_t5"])):
        raise ValueError(
            f"positive, negative: the prompt has {lengths[0]} tokens of CLIP and {lengths[1]} of T5, this model takes "
            f"{needed[0]} and {needed[1]}. Shorten it, and do not concatenate conditionings."
        )
    known = config["use_style_cond_and_image_meta_size"]
    return tensors | ({"image_meta_size": given["image_meta_size"]} if known else {})


def example(config: Config, _text_tokens: int) -> dict[str, torch.Tensor]:
    words, t5_words = config["text_len"], config["text_len_t5"]
    tensors = {
        "context": torch.randn(1, words, config["cross_attention_dim"]),
        "text_embedding_mask": torch.ones(1, words, dtype=torch.bool),
        "encoder_hidden_states_t5": torch.randn(1, t5_words, config["cross_attention_dim_t5"]),
        "text_embedding_mask_t5": torch.ones(1, t5_words, dtype=torch.bool),
    }
    return tensors | ({"image_meta_size": torch.ones(1, 6)} if config["use_style_cond_and_image_meta_size"] else {})
