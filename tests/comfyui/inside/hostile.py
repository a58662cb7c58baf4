"""Hostile LoRA files, widget values and requests in a real ComfyUI. Run by ComfyUI's Python, see boot.py.

Property: a ValueError that begins with an input's name, in one short line, or a picture; and the ranks live on either way.
Each case is made from its number and the seed alone.
"""

import json
import math
import os
import random
import sys
from collections.abc import Callable
from typing import Any

from boot import BASE, Results, comfy, ksampler, node, nodes, parallel, torch
from safetensors.torch import save_file

FILE, LAYERS = (
    "tiny.safetensors",
    ("double_blocks.0.img_attn.proj", "single_blocks.0.linear2", "double_blocks.0.img_attn.qkv"),
)
MOST_LETTERS = 1500
TEXTS = ("\x1b[31mred", "a\nERROR: forged", "\u202egnp", "x" * 100_000, "", "../a", "\0")
FACTORS = {
    "LoRA": ("lora_A.weight", "lora_B.weight"),
    "LoCon": ("lora_down.weight", "lora_up.weight", "lora_mid.weight"),
    "LoHa": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "LoHa, cores": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    "LoKr": ("lokr_w1", "lokr_w2"),
    "LoKr, factors": ("lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    "GLoRA": ("a1.weight", "a2.weight", "b1.weight", "b2.weight"),
    "OFT": ("oft_blocks",),
    "BOFT": ("oft_blocks",),
    "difference": ("diff",),
    "bias": ("diff_b",),
    "set": ("set_weight",),
}
"""Kind of a patch -> its tensors in a file."""
SIZES = (0, 1, 2, 3, 4, 4, 4, 8, 16, 64, 256, 256, 256, 768, 1280)


def lora(rng: random.Random) -> dict[str, torch.Tensor]:
    """Of one layer or two, in one kind or in several that exclude each other."""
    tensors = {}
    for layer in rng.sample(LAYERS, rng.choice((1, 1, 2))):
        rows, columns = {LAYERS[0]: (256, 256), LAYERS[1]: (256, 1280), LAYERS[2]: (768, 256)}[layer]
        kind = rng.choice(list(FACTORS))
        for name in FACTORS[kind]:
            sides = _sides(rng, kind, name, rows, columns)
            if rng.random() < 0.9:
                tensors[f"diffusion_model.{layer}.{name}"] = _values(rng, sides)
        if rng.random() < 0.3:
            alpha = rng.choice((0.0, 1.0, -3.0, math.nan, math.inf, 1e38))
            tensors[f"diffusion_model.{layer}.alpha"] = torch.tensor(alpha)
        if rng.random() < 0.15:
            sides = rng.choice(((rows,), (rows, 1), (1, columns), (columns,), (3,), ()))
            tensors[f"diffusion_model.{layer}.dora_scale"] = _values(rng, sides)
        if rng.random() < 0.05:
            tensors[f"diffusion_model.{layer}.reshape_weight"] = torch.tensor(
                rng.choice(([256, 512], [1], [0, 0], [2**40, 2]))
            )
        if rng.random() < 0.05:
            tensors[f"diffusion_model.{layer}{rng.choice(TEXTS)}.lora_A.weight"] = torch.ones(4, 4)
    return tensors or {"a": torch.ones(1)}


def _sides(rng: random.Random, kind: str, name: str, rows: int, columns: int) -> tuple[int, ...]:
    """The right shape, or one that is near it."""
    right = {
        "lora_A.weight": (4, columns),
        "lora_B.weight": (rows, 4),
        "lora_down.weight": (4, columns),
        "lora_up.weight": (rows, 4),
        "lora_mid.weight": (4, 4, 1, 1),
        "hada_w1_a": (rows, 4),
        "hada_w1_b": (4, columns),
        "hada_w2_a": (rows, 4),
        "hada_w2_b": (4, columns),
        "hada_t1": (4, 4, 1, 1),
        "hada_t2": (4, 4, 1, 1),
        "lokr_w1": (4, 4),
        "lokr_w2": (rows // 4, columns // 4),
        "lokr_w1_a": (4, 2),
        "lokr_w1_b": (2, 4),
        "lokr_w2_a": (rows // 4, 4),
        "lokr_w2_b": (4, columns // 4),
        "lokr_t2": (4, 4, 1, 1),
        "oft_blocks": (8, rows // 8, rows // 8) if kind == "OFT" else (2, 8, rows // 8, rows // 8),
        "a1.weight": (4, columns),
        "a2.weight": (columns, 4),
        "b1.weight": (4, columns),
        "b2.weight": (rows, 4),
        "diff": (rows, columns),
        "diff_b": (rows,),
        "set_weight": (rows, columns),
    }[name]
    if rng.random() < 0.6:
        return right
    sides = list(right)
    how = rng.randrange(5)
    if how == 0:
        sides[rng.randrange(len(sides))] = rng.choice(SIZES)
    elif how == 1:
        sides.reverse()
    elif how == 2:
        sides.append(rng.choice((1, 1, 3)))
    elif how == 3:
        sides.pop()
    else:
        sides = [math.prod(sides)]
    return tuple(sides)


def _values(rng: random.Random, sides: tuple[int, ...]) -> torch.Tensor:
    values = torch.full(sides, rng.choice((0.01, 0.01, 0.01, 0.0, math.nan, math.inf, 1e30)))
    kind = rng.choice(
        (*[torch.float32] * 5, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.float64, torch.bool)
    )
    return values.nan_to_num(0, 1, 1).to(kind) if kind in (torch.int8, torch.bool) else values.to(kind)


def widgets(rng: random.Random) -> dict[str, Any]:
    """What a workflow says of Parallel DiT Loader."""
    odd = (0, -1, 2, 3, 65, 2**63, 1.5, math.nan, None, "", "2", "nan", [], {}, True, *TEXTS)
    names = nodes.NODE_CLASS_MAPPINGS["ParallelDiTLoader"].INPUT_TYPES()
    names = [*names["required"], *names["optional"]]
    values = {"model_name": FILE, "devices": "cpu", "weight_dtype": "fp32"}
    for _ in range(rng.choice((1, 1, 2, 3))):
        values[rng.choice(names)] = rng.choice(odd)
    return values


def body(rng: random.Random) -> bytes:
    """What is posted to /parallel_dit/plan."""
    names = (FILE, "tiny-sd3.safetensors", "truncated.safetensors", "vae.safetensors", "../x", *TEXTS, 1, None, [FILE, 0])
    loaders = [
        {
            "class_type": rng.choice(("UNETLoader", "ParallelDiTLoader", *TEXTS)),
            "inputs": {rng.choice(("unet_name", "a", *TEXTS)): rng.choice(names)},
        }
        for _ in range(rng.choice((0, 1, 2, 30, 1000, 1001)))
    ]
    whole = rng.choice(
        ({"loaders": loaders}, {"loaders": loaders}, loaders, {"loaders": rng.choice((None, 1, {}, [1], [[]], [{}]))}, None)
    )
    text = json.dumps(whole).encode()
    how = rng.randrange(8)
    if how == 0:
        return text[: rng.randrange(len(text) + 1)]
    if how == 1:
        return rng.choice((b"", b"[" * 100_000, b"\xff\xfe", b'{"loaders":' * 50_000, b"1" * 5000, b"NaN", b" " * (1 << 23)))
    return text


def named(error: BaseException) -> bool:
    text = str(error)
    beginning = text.partition(" ")[0].rstrip(":,").replace("_", "")
    return isinstance(error, ValueError) and beginning.isalnum() and len(text) <= MOST_LETTERS and text.isprintable()


def main(results: Results, seed: int, counts: dict[str, int]) -> None:
    model = parallel(FILE, pipe=1, devices="cpu")
    from parallel_backend.client.not_finite import NotFiniteError
    from parallel_backend.client.registry import registry as the_registry

    generator = torch.Generator().manual_seed(1)
    prompts = [
        [[torch.randn(1, 8, 64, generator=generator), {"pooled_output": torch.randn(1, 32, generator=generator)}]]
    ] * 2
    latent = torch.zeros(1, 16, 4, 4)
    found: dict[str, Any] = {}

    def count(kind: str, case: Callable[[random.Random], Any]) -> None:
        outcomes, unnamed, ended, longest = {}, {}, {}, 0
        for number in range(counts.get(kind, 0)):
            pool = the_registry().pool
            try:
                outcome = case(random.Random(f"{seed} {kind} {number}"))
            except NotFiniteError:
                outcome = "not finite, and named"
            except Exception as error:
                longest = max(longest, len(str(error)))
                outcome = "refused" if named(error) else "unnamed"
                if outcome == "unnamed":
                    unnamed[number] = f"{type(error).__name__}: {str(error)[:500]!r}"
            if pool is not None and pool.error is not None:
                outcome, ended[number] = "rank ended", str(pool.error)[:500]
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        found[kind] = {"outcomes": outcomes, "unnamed": unnamed, "ended": ended, "longest": longest}

    def with_lora(rng: random.Random) -> str:
        path = BASE / "models" / "loras" / "hostile.safetensors"
        save_file(lora(rng), path)
        os.utime(path)
        patched, _ = comfy.sd.load_lora_for_models(
            model, None, comfy.utils.load_torch_file(str(path), safe_load=True), 1.0, 0
        )
        ksampler(patched, prompts, latent, steps=1, cfg=1.0)
        return "run"

    def with_widgets(rng: random.Random) -> str:
        node("ParallelDiTLoader", **widgets(rng))
        return "taken"

    def with_body(rng: random.Random) -> str:
        package = nodes.NODE_CLASS_MAPPINGS["ParallelDiTLoader"].__module__.rpartition(".")[0]
        menu = sys.modules[f"{package}.run_on_several_gpus"]
        answer = json.dumps(menu.answer(menu.asked(menu.parsed(body(rng))), plans.setdefault("plans", menu.FilePlans())))
        return "answered" if len(answer) < 1_000_000 else "a long answer"

    plans: dict[str, Any] = {}
    count("LoRA", with_lora)
    count("widgets", with_widgets)
    count("requests", with_body)
    results.case("found", lambda: found)
