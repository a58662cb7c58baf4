"""LoRA files that nobody would write, for a real ComfyUI: put on its own model and on ours by its own node."""

import contextlib
import itertools
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from testing import mini
from testing.comfyui.scripted import ComfyUI, Inside
from tests.campaigns.fuzz import damage
from tests.campaigns.fuzz.runner import Case, Make

from .tensors import Stored, Tensors, changed, resized, stored, write
from .verdict import CLOSE, MOST_LETTERS

MODEL = "hostile.safetensors"
STRENGTHS = (1.0, 1.0, 1.0, 0.5, -1.0, 0.0, 100.0)
PREFIXES = ("diffusion_model.", "lora_unet_", "transformer.", "")
LARGE = 1e30


SCRIPTS = Path(__file__).parent / "inside"


def save_model(folder: Path) -> None:
    """The model that LoRA files are for, where ComfyUI finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    mini.save(mini.random_model(mini.IN_COMFYUI), folder / MODEL)


@cache
def layers() -> dict[str, torch.Size]:
    """Layers of the model in its original names -> shape of the weight."""
    state = mini.random_model(mini.IN_COMFYUI).state_dict()
    matrices = {key: value.shape for key, value in state.items() if key.endswith(".weight") and value.ndim == 2}
    return {key.removesuffix(".weight"): shape for key, shape in matrices.items()}


def factors(rng: random.Random, shape: torch.Size) -> dict[str, torch.Tensor]:
    """A sound adapter for a weight of this shape, of a random kind: the endings of its keys -> tensors."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    rows, columns = shape
    rank = rng.choice((1, 4))

    def made(*sides: int) -> torch.Tensor:
        return 0.1 * torch.randn(*sides, generator=generator)

    up, down = made(rows, rank), made(rank, columns)
    kinds: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "lora": lambda: {"lora_B.weight": up, "lora_A.weight": down},
        "kohya": lambda: {"lora_up.weight": up, "lora_down.weight": down, "alpha": torch.tensor(2.0)},
        "in the middle": lambda: {"lora_up.weight": up, "lora_down.weight": down, "lora_mid.weight": made(rank, rank, 1, 1)},
        "dora": lambda: {"lora_up.weight": up, "lora_down.weight": down, "dora_scale": made(rows, 1)},
        "loha": lambda: {
            f"hada_w{each}_{side}": made(*sides)
            for each in (1, 2)
            for side, sides in (("a", (rows, rank)), ("b", (rank, columns)))
        },
        "lokr": lambda: {"lokr_w1": made(4, 4), "lokr_w2_a": made(rows // 4, rank), "lokr_w2_b": made(rank, columns // 4)},
        "oft": lambda: {"oft_blocks": made(4, rows // 4, rows // 4), "alpha": torch.tensor(1e-3)},
        "diff": lambda: {"diff": made(rows, columns), "diff_b": made(rows)},
    }
    return kinds[rng.choice(list(kinds))]()


def sound(rng: random.Random) -> Tensors:
    """One to four layers' adapters."""
    tensors: dict[str, torch.Tensor] = {}
    for layer in rng.sample(sorted(layers()), rng.choice((1, 1, 2, 4))):
        prefix = rng.choice(PREFIXES)
        name = layer.replace(".", "_") if prefix == "lora_unet_" else layer
        tensors |= {f"{prefix}{name}.{ending}": value for ending, value in factors(rng, layers()[layer]).items()}
    return stored(tensors)


def odd(rng: random.Random, tensors: Tensors) -> Tensors:
    """With other values, or factors of other kinds beside it."""
    key = rng.choice(list(tensors))
    stem = key.rpartition(".")[0].removesuffix(".lora_up").removesuffix(".lora_down")
    if rng.random() < 0.5:
        ending = rng.choice(("alpha", "dora_scale", "reshape_weight", "lora_mid.weight", "diff", "hada_w1_a", "lokr_w1"))
        value = rng.choice((float("nan"), 0.0, LARGE, [1.0], [[1.0, 1.0]] * 2))
        return tensors | {f"{stem}.{ending}": Stored.of(torch.tensor(value))}
    return tensors | {key: resized(rng, resized(rng, tensors[key]))}


def write_lora(rng: random.Random, path: Path) -> None:
    tensors, how = sound(rng), rng.random()
    if how > 0.05:
        tensors = (changed if rng.random() < 0.6 else odd)(rng, tensors)
    write(path, tensors, rng.choice(list(tensors)) if tensors and how > 0.97 else None)
    if 0.9 < how < 0.97:
        content = path.read_bytes()
        path.write_bytes(damage.bytes_of(rng, content[:600]) + content[600:])


@contextlib.contextmanager
def loras(comfyui: ComfyUI, base: Path) -> Iterator[Make]:
    """`base`: an empty base directory for ComfyUI."""
    folder, numbers = base / "models" / "loras", itertools.count()
    folder.mkdir(parents=True)
    save_model(base / "models" / "diffusion_models")

    def make(rng: random.Random) -> Case:
        name, strength = f"{next(numbers)}.safetensors", rng.choice(STRENGTHS)
        write_lora(rng, folder / name)
        return lambda: judge(inside.run("lora_files", model=MODEL, file=name, strength=strength)[0])

    with contextlib.closing(Inside(comfyui, base, SCRIPTS)) as inside:
        yield make


def judge(results: dict[str, Any]) -> str:
    """`results`: see inside/lora_files.py. AssertionError for what is wrong."""
    found = results["with it"]
    assert "error" not in found, found["traceback"]
    assert results["as before"] == 0.0, "the model without LoRA is another one afterwards"
    text, kind = found.get("text", ""), found.get("kind", "")
    assert found["lives"], f"the ranks ended: {text}"
    if not kind:
        assert found["far"] is None or found["far"] < CLOSE, f"off by {found['far']:.3g}"
        return "run"
    if kind != "ValueError" and found.get("theirs", "").startswith(f"{kind}: "):
        return "refused by ComfyUI"
    assert found["not finite"] or (kind == "ValueError" and re.match("model(_name)?: ", text)), f"{kind}: {text[:400]!r}"
    for said in (text, found["cause"]):
        assert len(said) <= MOST_LETTERS and said.isprintable(), f"{len(said)} letters: {said[:400]!r}"
    return "refused"
