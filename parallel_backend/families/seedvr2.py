"""SeedVR2: a video made sharper and larger in one step; attention in windows, with the text in each of them.

Key layout: ByteDance's, which ComfyUI's files have. The text is one of two that are in the file, and nodes read it there.
"""

import math
from typing import Any

import torch

from parallel_backend.core.spans import Span

from .base.blocks import WINDOWS, BlockList, Blocks, Windows
from .base.family import Family, Forward, Inputs, Sizes, cached
from .base.file_layout import FileLayout, Source
from .base.patching import Patching
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN, HEADS, ROW, ROW_BY_HEADS, CutKind, LayerCut
from .parts.conditioning import count_blocks, text
from .parts.key_map import WEIGHT, KeyMap

BLOCKS, PATCHING = "blocks", Patching(video=True)
TEXTS = ("positive_conditioning", "negative_conditioning")
_STREAMS = ("vid", "txt", "all")
_MODULATION = tuple(f"{part}_{kind}" for part in ("attn", "mlp") for kind in ("shift", "scale", "gate"))
_FREQUENCIES = "attn.rope.rope.freqs"
_CUTS = {
    "attn.proj_qkv.{}": LayerCut(CutKind.COLUMN, (HEADS, HEADS, HEADS)),
    "attn.proj_out.{}": ROW_BY_HEADS,
    "mlp.{}.proj_in_gate": COLUMN,
    "mlp.{}.proj_in": COLUMN,
    "mlp.{}.proj_out": ROW,
}
COUNTS, TOKENS, FRAMES = (4, 3, 3), 45 * 80, 30
"""Windows along frames, rows and columns of a video with TOKENS in a frame and FRAMES or more. Larger videos have windows of
the same size, and more of them."""


def axis_windows(size: int, window: int, shifted: bool) -> tuple[Span, ...]:
    """Windows of `window` tokens along an axis of `size`. `shifted`: the first one has half as many."""
    shift = 0.5 if shifted and window < size else 0.0
    count = math.ceil((size - shift) / window) + (shift > 0)
    edges = ((max(int((index - shift) * window), 0), min(int((index - shift + 1) * window), size)) for index in range(count))
    return tuple(Span(start, stop) for start, stop in edges if stop > start)


def windows(grid: tuple[int, ...]) -> tuple[Windows, ...]:
    """`Blocks.windows`: those of even blocks, and those of odd ones, which are shifted by half a window."""
    frames, rows, columns = grid
    scale = math.sqrt(TOKENS / (rows * columns))
    sides = min(frames, FRAMES), round(rows * scale), round(columns * scale)
    lengths = [math.ceil(side / count) for side, count in zip(sides, COUNTS, strict=True)]
    return tuple(
        tuple(axis_windows(size, length, shifted) for size, length in zip(grid, lengths, strict=True))
        for shifted in (False, True)
    )


def places_in_windows(grid: tuple[int, ...]) -> torch.Tensor:
    """[N, 2, 2, 3] float32: see Positions.forward (models/seedvr2.py). Tokens are in the order of frames, rows, columns."""
    ways = []
    for spans in windows(grid):
        places = [torch.cat([torch.arange(float(len(span))) for span in axis]) for axis in spans]
        sizes = [torch.cat([torch.full((len(span),), float(len(span))) for span in axis]) for axis in spans]
        ways.append(torch.stack([torch.cartesian_prod(*axes) for axes in (places, sizes)], dim=1))
    return torch.stack(ways, dim=1)


def _configure(shapes: Shapes) -> Config:
    width, tokens = shapes["vid_in.proj.weight"]
    video = "vid" if f"{BLOCKS}.0.attn.norm_q.vid.weight" in shapes else "all"
    (head,), feed_forward = shapes[f"{BLOCKS}.0.attn.norm_q.{video}.weight"], f"{BLOCKS}.0.mlp.{video}"
    count = count_blocks(shapes, f"{BLOCKS}.")
    kept = [key for index in range(count) if (key := f"{BLOCKS}.{index}.attn.proj_qkv.vid.weight") in shapes]
    pixels, stored = "vid_out_norm.weight" not in shapes, shapes.get(f"{BLOCKS}.0.{_FREQUENCIES}")
    return {
        "in_channels": tokens // 4,
        "out_channels": shapes["vid_out.proj.weight"][0] // 4,
        "num_layers": count,
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "text_dim": shapes["txt_in.weight"][1],
        "ffn_dim": shapes[f"{feed_forward}.proj_in.weight"][0],
        "gated": f"{feed_forward}.proj_in_gate.weight" in shapes,
        "separate_layers": len(kept),
        "rope_frequencies": stored[0] if stored else (head // 2 if pixels else head) // 3 // 2,
        "pixel_rope": pixels,
        "stored_rope": stored is not None and not pixels,
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys, count = KeyMap(), config["num_layers"]
    keys.same("vid_in.proj", "txt_in", "emb_in.proj_in", "emb_in.proj_hid", "emb_in.proj_out", "vid_out.proj")
    if config["stored_rope"]:
        keys.tensor("rope.freqs", f"{BLOCKS}.0.{_FREQUENCIES}")
    if not config["pixel_rope"]:
        keys.same("vid_out_norm", parameters=WEIGHT)
        keys.same("vid_out_ada", parameters=("out_shift", "out_scale"))
    gate = ("proj_in_gate",) if config["gated"] else ()
    for index, block in enumerate(keys.each(BLOCKS, BLOCKS, count)):
        shared, text_ends = index >= config["separate_layers"], index == count - 1 and not config["pixel_rope"]
        for name in ("all",) if shared else ("vid", "txt"):
            block.same(*(f"attn.{layer}.{name}" for layer in ("proj_qkv", "norm_q", "norm_k")), parameters=WEIGHT)
            block.same(f"attn.proj_out.{name}")
            if text_ends and name == "txt":
                continue
            block.same(f"ada.{name}", parameters=_MODULATION)
            layers = (f"mlp.{name}.{layer}" for layer in (*gate, "proj_in", "proj_out"))
            block.same(*layers, parameters=WEIGHT if gate else ("weight", "bias"))
    return keys.sources


class _FileLayout(FileLayout):
    def computed(self, config: Config) -> dict[str, tuple[int, ...]]:
        names = [f"{BLOCKS}.{index}.{_FREQUENCIES}" for index in range(config["num_layers"])]
        return dict.fromkeys(names[1:] if config["stored_rope"] else names, (config["rope_frequencies"],))


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    context, latent, given = text("SeedVR2", config["text_dim"], call), call["latent"], call.get("condition")
    channels = config["in_channels"] - config["out_channels"]
    if given is None or given.ndim != 5 or given.shape[1] != channels:
        raise ValueError(
            f"positive, negative: SeedVR2 needs the video that it is to make sharper, as a latent of {channels} channels "
            "(an Apply SeedVR2 Conditioning node)."
        )
    if len(given) != latent[0]:
        raise ValueError(
            f"latent_image: {latent[0]} latents, but the conditioning of SeedVR2 has {len(given)}. Connect the latent that "
            "Apply SeedVR2 Conditioning has."
        )
    if given.shape[-2] % 2 or given.shape[-1] % 2:
        raise ValueError(
            f"latent_image: SeedVR2 needs even numbers of latent rows and columns, not {given.shape[-2]} x "
            f"{given.shape[-1]}. Use the SeedVR2 Preprocess node."
        )
    return {"context": context, "condition": PATCHING.cut("frames").pack(given)}


def _check_grid(grid: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> None:
    if "condition" in tensors and (tokens := tensors["condition"].shape[1]) != math.prod(grid):
        raise ValueError(
            f"latent_image: its {math.prod(grid)} tokens are not the {tokens} of the conditioning. Connect the latent that "
            "Apply SeedVR2 Conditioning has."
        )


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    given, x = step.tensors.get("condition"), step.image_tensor()
    width = 4 * (config["in_channels"] - config["out_channels"])
    return {
        "hidden_states": x,
        "condition": x.new_zeros(*x.shape[:2], width)
        if given is None
        else given[:, step.of_tokens("places in class", step.places_in_class)],
        "encoder_hidden_states": step.text_tensor("context", config["text_dim"]),
        "timestep": step.timestep,
        "places": step.of_tokens("windows", lambda image: places_in_windows(step.grid)[step.places_in_class(image)]),
        "text_places": step.text_numbers,
        "text_tokens": step.text_tokens,
    }


class _Forward(Forward):
    def float32(self, config: Config) -> tuple[str, ...]:
        return ("rope.freqs",)


SEEDVR2 = Family(
    name="seedvr2",
    model_class="SeedVR2Transformer3DModel",
    class_module="parallel_backend.families.models.seedvr2",
    native_classes=("SeedVR2",),
    file=_FileLayout(
        detect=lambda shapes: {"vid_in.proj.weight", "emb_in.proj_hid.weight", *TEXTS} <= shapes.keys(),
        configure=_configure,
        key_map=_key_map,
    ),
    blocks=Blocks(
        lists=(BlockList(BLOCKS, returns=("image", "text"), attention={"attn": WINDOWS}, values_first=False),),
        counts=lambda config: {BLOCKS: config["num_layers"]},
        prologue=("vid_in", "txt_in"),
        epilogue=("vid_out_norm", "vid_out_ada", "vid_out"),
        text_first=False,
        windows=windows,
    ),
    sizes=Sizes(latent_channels=lambda config: config["out_channels"]),
    inputs=Inputs(
        conditioning=_conditioning,
        check_grid=_check_grid,
        accepts=("condition",),
        token_tensors=("context",),
        vector_tensors=("condition",),
        exact=("condition",),
        example=lambda config, tokens: {"context": torch.randn(1, tokens, config["text_dim"])},
    ),
    forward=_Forward(arguments=_arguments, cached_modules=cached(call=("emb_in",), band=("rope",))),
    tensor_plan={BLOCKS: {layer.format(name): cut for layer, cut in _CUTS.items() for name in _STREAMS}},
    patching=PATCHING,
    half_dtypes=lambda _config: ("bf16", "fp16"),
    node_tensors=TEXTS,
)
