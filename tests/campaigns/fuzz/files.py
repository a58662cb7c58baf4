"""Model files: sound ones of every family, damaged, and what is not there never made.

The files are sparse: a header, and behind it as much of nothing as it says.
"""

import json
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint, open_checkpoint, to_original
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.core.validate import check_model
from parallel_backend.rank.stage.meta_model import meta_model
from testing.cases import all_cases

from . import damage
from .runner import Case

LARGEST = 1 << 36
"""Of a file, in bytes of nothing: tmpfs and ext4 have no larger sparse ones."""
ITEM = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I64": 8, "F64": 8}
PREFIX = "model.diffusion_model."


@dataclass(frozen=True)
class Sound:
    """A configuration of a family, as the shapes of its tensors in original layout."""

    name: str
    original: dict[str, list[int]]


def sound_models() -> list[Sound]:
    """Of every family's test cases."""
    found = []
    for case in all_cases():
        model = case.model()
        state = {name: value.to("meta") for name, value in model.state_dict().items()}
        original = to_original(case.row, dict(model.config) | case.config, state)
        original |= {key: torch.empty(shape, device="meta") for key, shape in case.row.file.computed(case.config).items()}
        found.append(Sound(case.name, {key: list(tensor.shape) for key, tensor in original.items()}))
    return found


def safetensors_header(shapes: dict[str, list[int]], dtype: str, metadata: dict[str, str]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for key, shape in shapes.items():
        size = ITEM[dtype] * torch.Size(shape).numel()
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header


def metadata(rng: random.Random) -> dict[str, str]:
    """What files say of themselves beside their tensors, mostly in a form that nobody writes."""
    said = {
        "_quantization_metadata": {"layers": {"txt_in": {"format": "float8_e4m3fn"}}},
        "config": {"transformer": {"causal_temporal_positioning": True, "cross_attention_adaln": False}},
    }
    found = {}
    for name, content in said.items():
        if rng.random() < 0.3:
            found[name] = damage.text(rng, content).decode(errors="replace")
        elif rng.random() < 0.1:
            found[name] = "[" * 100_000
    return found


def write_sparse(path: Path, header: bytes, length: int, size: int) -> Path:
    """`length`: what the file says of its header. `size`: of the tensors behind it."""
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length % 2**64))
        file.write(header)
        file.truncate(min(max(8 + len(header) + size, 0), LARGEST))
    return path


def safetensors(models: list[Sound], folder: Path):
    def make(rng: random.Random) -> Case:
        sound = rng.choice(models)
        shapes = {PREFIX + key: shape for key, shape in sound.original.items()} if rng.random() < 0.3 else sound.original
        shapes = reshaped(rng, shapes)
        header = safetensors_header(shapes, rng.choice((*["F32"] * 4, "BF16", "F8_E4M3", "U8", "F64")), metadata(rng))
        size = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        content = json.dumps(header).encode()
        if rng.random() < 0.5:
            content = damage.text(rng, header)
        size = rng.choice((*[size] * 6, 0, size - 1, size + 1, LARGEST))
        length = rng.choice((*[len(content)] * 8, 0, len(content) + 1, 2**26, 2**40, 2**63, -1))
        path = write_sparse(folder / "model.safetensors", content, length, size)
        return lambda: opened(path)

    return make


def reshaped(rng: random.Random, shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """With a few tensors of another shape, gone, or of another layer's name: still what a header may say."""
    shapes = dict(shapes)
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        key = rng.choice(list(shapes))
        how = rng.randrange(6)
        if how == 0:
            del shapes[key]
        elif how == 1:
            shapes[key] = [rng.choice((0, 1, 3, 64, 2**20)) for _ in shapes[key]]
        elif how == 2:
            shapes[key] = shapes[key][: rng.randrange(3)]
        elif how == 3:
            shapes[key] = [*shapes[key], rng.choice((0, 1, 2))]
        elif how == 4:
            shapes[key.replace(".0.", f".{rng.choice((7, 2**40, 'x', -1))}.")] = shapes.pop(key)
        else:
            shapes[rng.choice((f"{key}_scale", key.replace("weight", "scale_weight"), "scaled_fp8", "x.comfy_quant"))] = [1]
        if not shapes:
            break
        if sum(torch.Size(shape).numel() for shape in shapes.values()) > LARGEST // 8:
            shapes = {key: shape for key, shape in shapes.items() if torch.Size(shape).numel() < 2**24}
    return shapes


def gguf_bytes(shapes: dict[str, list[int]], alignment: int = 32) -> tuple[bytes, int]:
    """A header of version 3 with tensors in fp32, and how many bytes follow it."""

    def name(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    fields = [
        name("general.architecture") + struct.pack("<I", 8) + name("flux"),
        name("general.alignment") + struct.pack("<II", 4, alignment),
        name("tokenizer.tokens") + struct.pack("<IIQ", 9, 8, 2) + name("a") + name("b"),
        name("numbers") + struct.pack("<IIQ4f", 9, 6, 4, *range(4)),
    ]
    tensors, at = [], 0
    for key, shape in shapes.items():
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        tensors.append(name(key) + axes + struct.pack("<IQ", 0, at))
        at += -(-4 * torch.Size(shape).numel() // alignment) * alignment
        if len(shape) > 1:
            original = struct.pack(f"<IIQ{len(shape)}i", 9, 5, len(shape), *shape)
            fields.append(name(f"comfy.gguf.orig_shape.{key}") + original)
    head = struct.pack("<IIQQ", 0x46554747, 3, len(tensors), len(fields))
    whole = head + b"".join(fields) + b"".join(tensors)
    return whole, at


def gguf(models: list[Sound], folder: Path):
    def make(rng: random.Random) -> Case:
        content, size = gguf_bytes(reshaped_small(rng, rng.choice(models).original), rng.choice((8, 32, 32, 32, 4096)))
        kind = rng.randrange(6)
        if kind == 0:
            content = content[:24] + rng.randbytes(400)
        elif kind == 1:  # a count that is not true
            at = rng.choice((8, 16, content.find(b"tokenizer") + 24, content.find(b"numbers") + 15))
            content = content[:at] + struct.pack("<Q", rng.choice((3, 10**4, 2**31, 2**62, 2**64 - 1))) + content[at + 8 :]
        elif kind < 5:
            content = damage.bytes_of(rng, content)
        path = folder / "model.gguf"
        with path.open("wb") as file:
            file.write(content)
            file.truncate(min(len(content) + rng.choice((size + 4096, size + 4096, 0, LARGEST)), LARGEST))
        return lambda: opened(path)

    return make


def reshaped_small(rng: random.Random, shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    return {key: [min(size, 2**31 - 1) for size in shape] for key, shape in reshaped(rng, shapes).items()}


def opened(path: Path) -> str:
    """Refused in the words of a user; or all that is asked of a checkpoint before loading, and the model that ranks make."""
    try:
        checkpoint = open_checkpoint(path)
    except ValueError as error:
        assert str(error).startswith("model_name: "), error
        return "refused"
    look_at(checkpoint)
    try:
        model = meta_model(checkpoint.family, checkpoint.config)
    except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError, AssertionError, AttributeError, ImportError):
        return "refused by a rank"  # which names itself in the error
    return "opened" if set(checkpoint.key_map) <= set(model.state_dict()) else "refused by a rank"


def look_at(checkpoint: Checkpoint) -> None:
    """As the loader and ComfyUI's side do."""
    family, config = checkpoint.family, checkpoint.config
    assert checkpoint.dtype and checkpoint.original_shapes is not None
    assert family.sizes.max_side(config) is None or family.sizes.max_side(config) > 0
    assert family.blocks.counts(config) and family.blocks.owned(config, Span(0, family.blocks.total(config)))
    assert sum(checkpoint.nbytes(target, "bf16") for target in checkpoint.key_map) > 0
    for degrees in (Degrees(), Degrees(pipe=2), Degrees(tensor=4), Degrees(ulysses=3)):
        try:
            check_model(
                degrees,
                heads=family.sizes.heads(config),
                blocks=family.blocks.total(config),
            )
        except ValueError as error:
            assert "_degree is " in str(error), error
