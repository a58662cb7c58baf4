"""GGUF files: what they hold, and slices of it through the file's memory map. Needs the `gguf` package.

The format names dimensions fastest first. A tensor that its maker had to store in another shape has its own in
`comfy.gguf.orig_shape.<key>` (as written and read by ComfyUI-GGUF).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .packings import BLOCKS, Blocks

ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
PLAIN = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


class GgufFile:
    """An opened file. `get_slice` gives what safetensors' does: to be indexed, and then a tensor of the map's memory.

    A tensor of blocks is indexed as [rows, bytes] uint8, unless its rows are no whole number of blocks: such a one is
    read as float32.
    """

    def __init__(self, path: Path):
        self.path, reader = path, _open(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._shapes = {
            key.removeprefix(ORIGINAL_SHAPE): tuple(int(field.parts[part][0]) for part in field.data)
            for key, field in reader.fields.items()
            if key.startswith(ORIGINAL_SHAPE)
        }

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors.clear()  # the map is closed with the last array that looks into it

    def keys(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """As the model has it."""
        return self._shapes.get(key) or tuple(int(size) for size in reversed(self._tensors[key].shape))

    def dtype(self, key: str) -> str:
        """fp32, fp16, bf16, or one of packings.BLOCKS. ValueError for another type of the format."""
        kind = self._tensors[key].tensor_type.name
        if kind in PLAIN:
            return PLAIN[kind]
        if kind not in BLOCKS:
            raise ValueError(
                f"model_name: {self.path.name} holds {key} as {kind}, which cannot be expanded. Of GGUF's types these can: "
                f"{', '.join((*PLAIN, *BLOCKS))}."
            )
        return kind if self._whole_blocks(key, kind) else "fp32"

    def get_slice(self, key: str) -> torch.Tensor:
        data, kind, shape = self._tensors[key].data, self._tensors[key].tensor_type.name, self.shape(key)
        stored = torch.from_numpy(data)
        if kind == "BF16":
            return stored.view(torch.bfloat16).view(shape)
        if kind in PLAIN:
            return stored.view(shape)
        if self._whole_blocks(key, kind):
            return stored.view(shape[0], -1)
        return Blocks(kind).expand(stored.view(1, -1), torch.float32).view(shape)

    def _whole_blocks(self, key: str, kind: str) -> bool:
        shape = self.shape(key)
        return len(shape) > 1 and torch.Size(shape[1:]).numel() % BLOCKS[kind][0] == 0


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(
            f"model_name: {path.name} is a GGUF file, and reading those needs the Python package 'gguf': pip install gguf"
        ) from error
    try:
        return GGUFReader(path, "c")  # copy on write: torch has no read-only tensors
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise ValueError(f"model_name: {path.name} cannot be read; it is damaged or incomplete ({error}).") from error
