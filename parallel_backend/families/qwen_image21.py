"""Qwen-Image 2.1: pictures from text and from reference pictures, single-stream blocks, joint sequence [prefix, picture].

The prefix is the text with the reference pictures' tokens between its words. It has the place of the text stream, and is
modulated for time 0. Its words see the prefix up to themselves, its references the prefix up to their end, and the picture
sees all. Key layout: diffusers' QwenImage21Transformer2DModel; some of ComfyUI's files fuse two layers of the feed-forward.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from .base.blocks import CAUSAL_TEXT, BlockList, Blocks
from .base.family import Family, Forward, Inputs, Sizes, cached
from .base.file_layout import FileLayout, Source
from .base.patching import Patching
from .base.step_inputs import TEXT_ENDS, Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN, COLUMN_BY_HEADS, ROW, ROW_BY_HEADS
from .parts.conditioning import count_blocks, hidden, text
from .parts.key_map import WEIGHT, KeyMap

BLOCKS, PATCHING = "transformer_blocks", Patching(side=1)
SPLICED, PLACES, POSITIONS = "spliced", "prefix_places", "prefix_positions"
"""Conditioning tensors. SPLICED [B, R, C]: tokens of all reference pictures. PLACES [B, P] int64: the prefix's tokens, each
by its number among the T tokens of the text and then the R of SPLICED. POSITIONS [B, P + 1, 4] float32: index, row and
column of the prefix's tokens and whether a token is a reference's; the last is the picture's index. Rows and columns of
references are counted as if the picture's numbers of rows and columns were even."""
_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_TIME = ("time_text_embed.timestep_embedder.linear_1", "time_text_embed.timestep_embedder.linear_2")
_OUTSIDE = (*_TIME, "txt_in.text_norm", "txt_in.in_layer", "txt_in.out_layer", "img_in", "modulation.1", "proj_out")
_FUSED = "img_mlp.gate_up"
"""Layer of ComfyUI's files that is `gate_layer` and, below it, `proj`."""


def _detect(shapes: Shapes) -> bool:
    needed = ("txt_in.text_norm", "modulation.1", "img_in", "proj_out", f"{BLOCKS}.0.attn.norm_q")
    if any(f"{layer}.weight" not in shapes for layer in needed):
        return False
    return any(f"{BLOCKS}.0.{layer}.weight" in shapes for layer in (_FUSED, "img_mlp.proj"))


def _configure(shapes: Shapes) -> Config:
    (head,), (width, channels) = shapes[f"{BLOCKS}.0.attn.norm_q.weight"], shapes["img_in.weight"]
    return {
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0],
        "num_layers": count_blocks(shapes, f"{BLOCKS}."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "context_in_dim": shapes["txt_in.text_norm.weight"][0],
        "mlp_ratio": shapes[f"{BLOCKS}.0.img_mlp.out.weight"][1] // width,
        "axes_dims_rope": _rope_axes(head),
        "fused_mlp": f"{BLOCKS}.0.{_FUSED}.weight" in shapes,
    }


def _rope_axes(head: int) -> tuple[int, int, int]:
    """Channels of a head for each axis of the rotary embedding. The weights do not show them.

    The model has (16, 56, 56) in heads of 128. Other heads (test models) get these proportions, all even.
    """
    spatial = head * 7 // 16 // 2 * 2
    return head - 2 * spatial, spatial, spatial


def _key_map(config: Config) -> dict[str, Source]:
    if config.get("patch_size", 1) != 1 or not config.get("causal_condition", True):
        raise ValueError(
            "model_name: this Qwen-Image 2.1 has a patch_size or a causal_condition that ComfyUI's class does not have. Use "
            "the published model."
        )
    keys, inner = KeyMap(), config["mlp_ratio"] * hidden(config)
    keys.same(*_OUTSIDE, "norm_out.linear", parameters=WEIGHT)
    for block in keys.each(BLOCKS, BLOCKS, config["num_layers"]):
        block.same(*_QKV, "attn.norm_q", "attn.norm_k", "attn.to_out.0", "img_mlp.out", parameters=WEIGHT)
        if config["fused_mlp"]:
            block.split(_FUSED, dict.fromkeys(("img_mlp.gate_layer", "img_mlp.proj"), inner), WEIGHT)
        else:
            block.same("img_mlp.gate_layer", "img_mlp.proj", parameters=WEIGHT)
    return keys.sources


def prefix_tensors(words: int, sides: list[tuple[int, int]], slots: list[int]) -> dict[str, torch.Tensor]:
    """PLACES, POSITIONS and TEXT_ENDS, [1, ...] each, of a text of `words` tokens.

    `sides`: rows and columns of each reference picture. `slots`: number of the word before which each stands; those without
    one stand behind the text.
    """
    slots = (slots + [words] * len(sides))[: len(sides)]
    bounds, index, begin, total = [0, *slots, words], 0, words, 0
    places: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    ends: list[torch.Tensor] = []
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if (count := stop - start) > 0:
            ends.append(torch.arange(count) + total + 1)
            places.append(torch.arange(start, stop))
            numbers = torch.arange(float(count))[:, None] + index
            positions.append(F.pad(numbers.expand(-1, 3), (0, 1)))
            index, total = index + count, total + count
        if number < len(sides):
            rows, columns = sides[number]
            places.append(torch.arange(begin, begin + rows * columns))
            total, begin = total + rows * columns, begin + rows * columns
            ends.append(torch.full((rows * columns,), total))
            axes = (torch.arange(float(side)) - (side - side // 2) + side % 2 / 2 for side in (rows, columns))
            positions.append(torch.cartesian_prod(torch.tensor([float(index)]), *axes, torch.ones(1)))
            index += max(rows, columns)
    positions.append(torch.tensor([[index, 0.0, 0.0, 0.0]]))
    return {
        PLACES: torch.cat(places)[None],
        POSITIONS: torch.cat(positions)[None],
        TEXT_ENDS: torch.cat(ends)[None],
    }


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """ComfyUI's class reads neither the text's mask nor the method for references, so neither changes anything."""
    context, pictures = text("Qwen-Image 2.1", config["context_in_dim"], call), call.get("ref_latents") or ()
    tensors = {"context": context}
    for number, picture in enumerate(pictures, 1):
        if picture.ndim != 4 or picture.shape[1] != config["in_channels"]:
            raise ValueError(
                f"positive, negative: reference latent {number} has the shape {list(picture.shape)}, Qwen-Image 2.1 needs "
                f"[batch, {config['in_channels']}, rows, columns]. Encode it with Qwen-Image 2.1's VAE."
            )
    if pictures:
        tensors[SPLICED] = torch.cat([PATCHING.pack(picture) for picture in pictures], dim=1)
    sides = [(picture.shape[2], picture.shape[3]) for picture in pictures]
    prefix = prefix_tensors(context.shape[1], sides, list(call.get("image_slots") or ()))
    return tensors | {name: each.expand(len(context), *each.shape[1:]).to(context.device) for name, each in prefix.items()}


class _Inputs(Inputs):
    def references(self, call: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        return ()  # they are tokens of the prefix

    def text_tokens(self, tensors: Mapping[str, torch.Tensor]) -> int:
        return tensors[PLACES].shape[1]


def _positions(step: StepInputs) -> torch.Tensor:
    """[p + n, 3] float32 of the rank's tokens. Where a reference and the picture differ in whether their number of rows (or
    columns) is odd, the reference lies half a token off, so that both have one centre."""
    rows, columns = step.grid[-2:]
    places = step.tensors[POSITIONS][0]
    index, row, column, is_reference = places[:-1][step.text.slice].unbind(1)
    prefix = torch.stack((index, row - is_reference * (rows % 2 / 2), column - is_reference * (columns % 2 / 2)), dim=1)
    picture = step.positions(rows // 2 - rows, columns // 2 - columns)
    return torch.cat((prefix, picture + F.pad(places[-1, :1], (0, 2))))


def _arguments(step: StepInputs, _config: Config) -> dict[str, Any]:
    if step.text not in step.kept:
        step.kept[step.text] = _positions(step)
    context, tokens = step.tensors.get("context"), step.image_tensor()
    return {
        "hidden_states": tokens,
        "encoder_hidden_states": step.zeros(len(step.text)) if context is None else context,
        "references": step.tensors.get(SPLICED),
        "places": None if context is None else step.tensors[PLACES][0, step.text.slice],
        "timestep": step.timestep,
        "positions": step.kept[step.text],
    }


QWEN_IMAGE_21 = Family(
    name="qwen-image-2.1",
    model_class="QwenImage21Transformer2DModel",
    class_module="parallel_backend.families.models.qwen_image21",
    native_classes=("QwenImage21",),
    file=FileLayout(detect=_detect, configure=_configure, key_map=_key_map),
    blocks=Blocks(
        lists=(BlockList(BLOCKS, returns=("image",), joined=True, attention={"attn": CAUSAL_TEXT}),),
        counts=lambda config: {BLOCKS: config["num_layers"]},
        prologue=("img_in", "txt_in"),
        epilogue=("norm_out", "proj_out"),
        controlled=True,
        native={"single_block": BLOCKS},
        native_patches=("attn1_patch", "post_input", "single_block"),
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=_Inputs(
        conditioning=_conditioning,
        accepts=("attention_mask", "ref_latents", "ref_latents_method", "image_slots"),
        token_tensors=("context", SPLICED),
        whole_text=True,
        vector_tensors=(PLACES, POSITIONS, TEXT_ENDS),
        exact=(POSITIONS,),
        example=lambda config, tokens: (
            {"context": torch.randn(1, tokens, config["context_in_dim"])} | prefix_tensors(tokens, [], [])
        ),
    ),
    forward=Forward(
        arguments=_arguments,
        cached_modules=cached(
            call=("time_text_embed", "modulation", "norm_out.linear"), prompt=("txt_in",), band=("pos_embed",)
        ),
    ),
    tensor_plan={
        BLOCKS: {
            **dict.fromkeys(_QKV, COLUMN_BY_HEADS),
            "attn.to_out.0": ROW_BY_HEADS,
            **dict.fromkeys(("img_mlp.gate_layer", "img_mlp.proj"), COLUMN),
            "img_mlp.out": ROW,
        }
    },
    patching=PATCHING,
)
