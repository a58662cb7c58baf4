"""Tensors as a file has them, and ways to make a file of them that nobody would write."""

import json
import random
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from parallel_backend.checkpoints.tensor_files import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
TEXTS = (
    "\x1b[2J\x1b[31mred",
    "a\nERROR: forged\r\nline",
    "\u202egnp.elif",
    "\u2066\u200b\ufeff",
    "x" * 300_000,
    "\0",
    "\ud83d\ude00",
    "../../etc/passwd",
    "{curly} %s %d",
    "",
)
"""Names that act on a terminal, or are long."""
NUMBERS = (0, -1, 1, 2, 3, 5, 7, 256, 256.0, 1.5, 2**31, 2**63, 10**30, True, None, "256", [256], {}, float("nan"))


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: safetensors' dtype, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    @staticmethod
    def of(tensor: torch.Tensor) -> "Stored":
        flat = tensor.detach().contiguous().flatten()
        return Stored(NAMES[tensor.dtype], tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes())


Tensors = dict[str, Stored]


def stored(state: dict[str, torch.Tensor]) -> Tensors:
    return {key: Stored.of(tensor) for key, tensor in state.items()}


def write(path: Path, tensors: Tensors) -> None:
    """A safetensors file."""
    header: dict[str, Any] = {}
    at = 0
    for key, tensor in tensors.items():
        header[key] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + len(tensor.content)]}
        at += len(tensor.content)
    content = json.dumps(header).encode(errors="surrogatepass")
    path.write_bytes(struct.pack("<Q", len(content)) + content + b"".join(tensor.content for tensor in tensors.values()))


def reshaped(rng: random.Random, tensor: Stored) -> Stored:
    """The same bytes in another shape."""
    shape = list(tensor.shape)
    how = rng.randrange(6)
    if how == 0:
        rng.shuffle(shape)
    elif how == 1:
        shape = [torch.Size(shape).numel()]
    elif how == 2:
        shape.insert(rng.randrange(len(shape) + 1), 1)
    elif how == 3 and len(shape) > 1:
        shape = [shape[0] * shape[1], *shape[2:]]
    elif how == 4 and shape and shape[0] % 2 == 0:
        shape = [shape[0] // 2, 2, *shape[1:]]
    elif len(shape) == 2 and shape[1] % 2 == 0:
        shape = [shape[0] * 2, shape[1] // 2]
    return replace(tensor, shape=tuple(shape))


def resized(rng: random.Random, tensor: Stored) -> Stored:
    """With another size along an axis: cut off, or repeated."""
    if not tensor.shape or not tensor.content:
        return replace(tensor, shape=(1,), content=tensor.content[: DTYPES[tensor.dtype].itemsize])
    axis = rng.randrange(len(tensor.shape))
    size = rng.choice(
        (0, 1, tensor.shape[axis] + 1, tensor.shape[axis] * 2, tensor.shape[axis] // 2, tensor.shape[axis] - 1)
    )
    shape = tuple(size if index == axis else each for index, each in enumerate(tensor.shape))
    count = torch.Size(shape).numel() * DTYPES[tensor.dtype].itemsize
    return replace(tensor, shape=shape, content=(tensor.content * (count // len(tensor.content) + 1))[:count])


def retyped(rng: random.Random, tensor: Stored) -> Stored:
    """The same bytes under another dtype, or other bytes of it."""
    kind = rng.choice(list(DTYPES))
    count = torch.Size(tensor.shape).numel() * DTYPES[kind].itemsize
    if count == len(tensor.content):
        return replace(tensor, dtype=kind)
    return replace(
        tensor, dtype=kind, content=(tensor.content * (count // max(1, len(tensor.content)) + 1))[:count].ljust(count, b"\0")
    )


def spoiled(rng: random.Random, tensor: Stored) -> Stored:
    """With values that are NaN, infinite or very large."""
    value = rng.choice((b"\xff", b"\x7f", b"\x7c", b"\x80", b"\0"))
    count = rng.choice((1, 2, len(tensor.content))) * 4
    return replace(tensor, content=(value * min(count, len(tensor.content))) + tensor.content[count:])


def changed(rng: random.Random, tensors: Tensors, likely: str = "") -> Tensors:
    """With one to three tensors changed, gone, renamed, or there for no reason. `likely`: part of the keys to choose "
    "from."""
    tensors = dict(tensors)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        keys = [key for key in tensors if likely in key] or list(tensors)
        if not keys:
            return tensors
        key = rng.choice(keys)
        how = rng.randrange(9)
        if how == 0:
            del tensors[key]
        elif how == 1:
            tensors[rng.choice(TEXTS) or "a"] = tensors.pop(key)
        elif how == 2:
            tensors[key + rng.choice((".weight_scale", "_scale", ".comfy_quant", rng.choice(TEXTS)))] = tensors[key]
        elif how < 5:
            tensors[key] = reshaped(rng, tensors[key])
        elif how < 7:
            tensors[key] = resized(rng, tensors[key])
        elif how == 7:
            tensors[key] = retyped(rng, tensors[key])
        else:
            tensors[key] = spoiled(rng, tensors[key])
    return tensors
