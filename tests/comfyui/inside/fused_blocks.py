"""Modules of ComfyUI's classes with and without their fused forms. Run by serve.py."""

import copy
import functools
import importlib
from collections import Counter
from typing import Any
from unittest import mock

from boot import Results, torch
from comfy.ldm.flux.layers import EmbedND
from comfy.ldm.krea2.model import SingleStreamBlock
from comfy.ldm.minimax.model import DiTBlock, rope_rotation_table
from comfy.ldm.qwen_image.model import QwenImageTransformerBlock

from parallel_backend.core import kitchen
from parallel_backend.own_class.built.building import CASTS, TorchLayers
from parallel_backend.own_class.cuts import fused, fused_blocks
from parallel_backend.own_class.cuts.forms import Form

WIDTH, HEADS, TOKENS, WORDS, BATCH = 128, 4, 30, 7, 2
Arguments = dict[str, Any]


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Values that bf16 has."""
    return torch.randn(shape, generator=generator).bfloat16().float()


def qwen_image(generator: torch.Generator) -> tuple[torch.nn.Module, Arguments]:
    block = QwenImageTransformerBlock(WIDTH, HEADS, WIDTH // HEADS, operations=TorchLayers)
    places = torch.arange(WORDS + TOKENS)[None, :, None].expand(BATCH, -1, 3)
    return block, {
        "hidden_states": drawn(generator, BATCH, TOKENS, WIDTH),
        "encoder_hidden_states": drawn(generator, BATCH, WORDS, WIDTH),
        "encoder_hidden_states_mask": None,
        "temb": drawn(generator, BATCH, WIDTH),
        "image_rotary_emb": EmbedND(WIDTH // HEADS, 10000, [8, 12, 12])(places),
        "timestep_zero_index": None,
        "transformer_options": {},
    }


def krea2(generator: torch.Generator) -> tuple[torch.nn.Module, Arguments]:
    block = SingleStreamBlock(WIDTH, HEADS, 2, kvheads=2, operations=TorchLayers)
    places = torch.arange(TOKENS)[None, :, None].expand(BATCH, -1, 3)
    return block, {
        "x": drawn(generator, BATCH, TOKENS, WIDTH),
        "vec": drawn(generator, BATCH, 1, 6 * WIDTH),
        "freqs": EmbedND(WIDTH // HEADS, 1000, [8, 12, 12])(places),
        "transformer_options": {},
    }


def minimax_h3(generator: torch.Generator) -> tuple[torch.nn.Module, Arguments]:
    """Runs of tokens, and tokens with a row each, as under a mask."""
    head = WIDTH // HEADS
    block = DiTBlock(WIDTH, HEADS, head, WIDTH, WIDTH, 1e-5, 1e-5, operations=TorchLayers)
    angles = torch.arange(TOKENS)[:, None] / torch.arange(1, head // 2 + 1)
    return block, {
        "x": drawn(generator, TOKENS, WIDTH),
        "t_emb": drawn(generator, 2, WIDTH),
        "mod_segments": [(0, WORDS, 1), (WORDS, 12, 5), (12, TOKENS, torch.arange(TOKENS - 12) % 6)],
        "rope_freqs": rope_rotation_table(angles.repeat(1, 2)[:, : head - 8], torch.float32),
        "transformer_options": {},
    }


CASES = {
    "Qwen-Image": qwen_image,
    "Krea 2": krea2,
    "MiniMax H3": minimax_h3,
}


def outputs(block: torch.nn.Module, given: Arguments, dtype: torch.dtype) -> torch.Tensor:
    cast = {name: each.to(dtype, copy=True) if isinstance(each, torch.Tensor) else each for name, each in given.items()}
    if dtype == torch.bfloat16 and "freqs" in cast:  # Krea 2's table stays in float32
        cast["freqs"] = given["freqs"]
    with torch.inference_mode():
        out = copy.deepcopy(block).to(dtype)(**cast)
    return torch.cat([each.double().flatten() for each in (out if isinstance(out, tuple) else (out,))])


def compared(make: Any) -> dict[str, Any]:
    """Differences as shares: of the largest value in fp32, and of the root mean square in bf16 from fp32."""
    generator, called = torch.Generator().manual_seed(0), Counter()
    plain, given = make(generator)
    plain.requires_grad_(False)  # operations in place take no others
    for name, parameter in plain.named_parameters():
        size = 0.7 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.2
        is_norm = "norm" in name and not name.endswith("scale")
        parameter.data = drawn(generator, *parameter.shape).mul(size).add(is_norm).bfloat16().float()
    for module in plain.modules():
        vars(module).update(CASTS)
    block = copy.deepcopy(plain)
    fused_blocks.fuse(block)
    kernel = functools.cache(kitchen.DirectCall)

    def by_kitchen(name: str, _x: torch.Tensor) -> Any:
        called[name] += 1
        return kernel(name)

    expected = outputs(plain, given, torch.float32)
    found = {"torch": outputs(block, given, torch.float32)}
    half, halves = outputs(plain, given, torch.bfloat16), {"torch": outputs(block, given, torch.bfloat16)}
    with mock.patch.object(fused, "_kernel", by_kitchen):
        found["kernels"], halves["kernels"] = (outputs(block, given, dtype) for dtype in (torch.float32, torch.bfloat16))
    size = expected.square().mean()
    return {
        "forms": sorted({type(module).__name__ for module in block.modules() if isinstance(module, Form)}),
        "kernels": sorted(called),
        "fp32": {by: float((each - expected).abs().max() / expected.abs().max()) for by, each in found.items()},
        "bf16": {by: float((each - expected).square().mean() / size) for by, each in halves.items()},
        "bf16 unfused": float((half - expected).square().mean() / size),
    }


def of_another_source() -> bool:
    """Whether a block gets a form although its source has changed since the form was written."""
    changed = {name: ("another", form) for name, (_, form) in fused_blocks.FORMS.items()}
    block = krea2(torch.Generator())[0]
    with mock.patch.object(fused_blocks, "FORMS", changed):
        fused_blocks.fuse(block)
    return isinstance(block, Form)


def is_known(name: str) -> bool:
    """Whether this ComfyUI's class has the source that its form was written for."""
    module, _, kind = name.rpartition(".")
    return fused_blocks.source_digest(getattr(importlib.import_module(module), kind)) == fused_blocks.FORMS[name][0]


def main(results: Results) -> None:
    results.case("known", lambda: {name: is_known(name) for name in fused_blocks.FORMS})
    for name, make in CASES.items():
        results.case(name, functools.partial(compared, make))
    results.case("another source", of_another_source)
