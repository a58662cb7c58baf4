"""Qwen-Image, Edit (2511 and its kind too) and Layered: joint blocks, joint sequence [text, image].

Edit 2511 modulates reference pictures for time 0, and other files do where the call's method for references asks for it.
Layered makes the layers of a picture as a video's frames. ComfyUI's files have diffusers' key layout.
"""

from typing import Any

import torch

from .base.blocks import BlockList, Blocks, Projections
from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed, cached
from .base.file_layout import FileLayout, Source
from .base.patching import Patching
from .base.segments import text_then_image
from .base.step_inputs import REFERENCES_AT_ZERO, TEXT_MASK, Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN, COLUMN_BY_HEADS, GATHER, ROW, ROW_BY_HEADS
from .parts.conditioning import count_blocks, rotations, text
from .parts.flux_blocks import rope_axes
from .parts.key_map import WEIGHT, KeyMap
from .parts.references import ACCEPTS, AT_ZERO, METHODS, reference_tensors

BLOCKS, PATCHING = "transformer_blocks", Patching(video=True)
EDIT_2511 = "__index_timestep_zero__"
"""Key that marks a file of Edit 2511, whose reference pictures are at time 0."""
LAYERED = "time_text_embed.addition_t_embedding"
"""Layer that only Layered has."""
_QKV = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_PLAN = {
    **dict.fromkeys(("img_mod.1", "txt_mod.1"), GATHER),
    **dict.fromkeys(_QKV, COLUMN_BY_HEADS),
    **dict.fromkeys(("attn.to_out.0", "attn.to_add_out"), ROW_BY_HEADS),
    **dict.fromkeys(("img_mlp.net.0.proj", "txt_mlp.net.0.proj"), COLUMN),
    **dict.fromkeys(("img_mlp.net.2", "txt_mlp.net.2"), ROW),
}
_NORMS = ("attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k")
_TIME = ("time_text_embed.timestep_embedder.linear_1", "time_text_embed.timestep_embedder.linear_2")


def _detect(shapes: Shapes) -> bool:
    needed = ("txt_norm.weight", "img_in.weight", "proj_out.weight", f"{BLOCKS}.0.img_mod.1.weight")
    return all(key in shapes for key in needed) and (shapes[needed[0]][0], shapes[needed[2]][0]) != (2560, 128)  # Mage-Flow


def _configure(shapes: Shapes) -> Config:
    head = shapes[f"{BLOCKS}.0.attn.norm_q.weight"][0]
    return {
        "in_channels": shapes["img_in.weight"][1],
        "out_channels": shapes["proj_out.weight"][0] // 4,
        "num_layers": count_blocks(shapes, f"{BLOCKS}."),
        "attention_head_dim": head,
        "num_attention_heads": shapes["img_in.weight"][0] // head,
        "joint_attention_dim": shapes["txt_norm.weight"][0],
        "axes_dims_rope": rope_axes(head),
        "zero_cond_t": EDIT_2511 in shapes,
        **dict.fromkeys(("use_additional_t_cond", "use_layer3d_rope"), f"{LAYERED}.weight" in shapes),
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    if config["use_additional_t_cond"]:
        keys.same(LAYERED, parameters=WEIGHT)
    keys.same("img_in", "txt_in", "norm_out.linear", "proj_out", *_TIME)
    keys.same("txt_norm", parameters=WEIGHT)
    for block in keys.each(BLOCKS, BLOCKS, config["num_layers"]):
        block.same(*_PLAN)
        block.same(*_NORMS, parameters=WEIGHT)
    return keys.sources


class _Forward(Forward):
    def prepare(self, model: Any, step: StepInputs) -> None:
        """Gives the model rotations of the rank's tokens, and blocks the mode of references at time 0.

        Row 0 of an odd grid is at -(rows // 2), as in ComfyUI; diffusers puts it one further away.
        """
        rows, columns = step.grid[-2:]
        rope, words = model.pos_embed, (step.text_numbers + max(rows // 2, columns // 2))[:, None].expand(-1, 3)
        positions = (step.positions(-(rows // 2), -(columns // 2)), words)
        rope.forward = lambda *_args, **_named: tuple(rotations(each, rope.axes_dim, rope.theta) for each in positions)
        # The forward's index of tokens at time 0 assumes whole pictures in the class's order: `_modulate_index` makes it.
        model.zero_cond_t, last = False, model.norm_out
        for block in model.transformer_blocks:
            block.zero_cond_t = REFERENCES_AT_ZERO in step.tensors
        last.forward = lambda tokens, embedded: type(last).forward(last, tokens, embedded[: len(tokens)])


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    layered = step.times.new_zeros(len(step.times), dtype=torch.long) if config["use_additional_t_cond"] else None
    return {
        "hidden_states": step.x,
        "encoder_hidden_states": step.text_tensor("context", config["joint_attention_dim"]),
        "timestep": step.times,
        "additional_t_cond": layered,
    }


def _modulate_index(_index: None, step: StepInputs) -> torch.Tensor | None:
    """[1, n] bool: which of the rank's image tokens are at time 0, see StepInputs.at_zero."""
    references = step.at_zero()
    return None if references is None else references[None]


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {"context": text("Qwen-Image", config["joint_attention_dim"], call)}
    method = "negative_index" if config["use_layer3d_rope"] else AT_ZERO if config["zero_cond_t"] else "index"
    tensors |= reference_tensors(PATCHING, call, method, centred=True, methods=(*METHODS, AT_ZERO))
    mask = call.get("attention_mask")
    return tensors if mask is None else tensors | {TEXT_MASK: mask.bool()}


QWEN_IMAGE = Family(
    name="qwen-image",
    model_class="QwenImageTransformer2DModel",
    fused_module="parallel_backend.families.models.fused_qwen_image",
    native_classes=("QwenImage",),
    file=FileLayout(detect=_detect, configure=_configure, key_map=_key_map, ignored=(EDIT_2511,)),
    blocks=Blocks(
        lists=(BlockList(BLOCKS, by_token={"modulate_index": _modulate_index}, projections=Projections()),),
        counts=lambda config: {BLOCKS: config["num_layers"]},
        prologue=("img_in", "txt_norm", "txt_in"),
        epilogue=("norm_out", "proj_out"),
        residuals={"input": BLOCKS},
        native={"double_block": BLOCKS},
        native_patches=("attn1_patch", "post_input", "double_block"),
        segments=text_then_image,
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"] // 4),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=("attention_mask", *ACCEPTS),
        token_tensors=("context",),
        vector_tensors=(REFERENCES_AT_ZERO,),
    ),
    forward=_Forward(
        arguments=_arguments,
        time_embed=TimeEmbed("time_text_embed"),
        cached_modules=cached(call=("time_text_embed", "*.img_mod", "*.txt_mod", "norm_out.linear"), band=("pos_embed",)),
    ),
    tensor_plan={BLOCKS: _PLAN},
    patching=PATCHING,
)
