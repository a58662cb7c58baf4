"""GGUF files: their tensors, as slices of the memory-mapped file. Needs the `gguf` package.

A tensor stored in another shape has its real shape in the field `comfy.gguf.orig_shape.<key>`, as ComfyUI-GGUF writes it.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from parallel_backend.core.dtypes import TORCH_DTYPES
from parallel_backend.core.short_text import short

from .gguf_header import MAX_HEADER_BYTES, read_gguf_header
from .mapped_file import MappedFile
from .packed_formats import GGUF_BLOCKS, GgufBlocks

ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
PLAIN = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


class GgufFile(MappedFile):
    """An opened file, mapped for its first tensor.

    A tensor of blocks is [rows, bytes] uint8. If its rows are no whole number of blocks, it is expanded to float32.
    """

    def __init__(self, path: Path):
        """ValueError, naming the file, if it cannot be read."""
        super().__init__(path)
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        except ImportError as error:
            raise ValueError(
                f"model_name: {short(path.name)} is a GGUF file. Reading it needs the Python package 'gguf': pip install "
                "gguf"
            ) from error
        try:
            with path.open("rb") as file:
                length, header = os.fstat(file.fileno()).st_size, read_gguf_header(memoryview(file.read(MAX_HEADER_BYTES)))
            self._kinds = {name: GGMLQuantizationType(tensor.kind) for name, tensor in header.tensors.items()}
            self._sizes = {}
            for name, tensor in header.tensors.items():
                values, size = GGML_QUANT_SIZES[self._kinds[name]]
                count = math.prod(tensor.shape)
                if (tensor.shape or (1,))[-1] % values or tensor.start + count // values * size > length:
                    raise ValueError(f"{short(name)} is not all there")
                self._sizes[name] = count // values * size
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(
                f"model_name: {short(path.name)} cannot be read. It is damaged or incomplete ({short(error, 200)})."
            ) from None
        self._tensors = header.tensors
        self.texts = header.texts
        """Fields that are texts, by name."""
        self._shapes = {name: shape for name in self._tensors if (shape := header.arrays.get(ORIGINAL_SHAPE + name))}
        for name, shape in self._shapes.items():
            if min(shape) < 1 or math.prod(shape) != math.prod(self._tensors[name].shape):
                raise ValueError(
                    f"model_name: {short(path.name)} has {short(name)} in a shape that does not match its number of values."
                )

    def keys(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """The tensor's shape in the model."""
        return self._shapes.get(key) or self._tensors[key].shape

    def dtype(self, key: str) -> str:
        """fp32, fp16, bf16, one of packed_formats.GGUF_BLOCKS, or the format's name of a type that cannot be read."""
        kind = self._kinds[key].name
        if kind in PLAIN:
            return PLAIN[kind]
        return kind if kind not in GGUF_BLOCKS or self._whole_blocks(key, kind) else "fp32"

    def get_tensor(self, key: str) -> torch.Tensor:
        if self._map is None:
            with self.path.open("rb") as file:
                self._map_whole(file)
        kind, shape, start = self._kinds[key].name, self.shape(key), self._tensors[key].start
        stored = self._bytes(start, self._sizes[key])
        if kind in PLAIN:
            return stored.view(TORCH_DTYPES[PLAIN[kind]]).view(shape)
        if self._whole_blocks(key, kind):
            return stored.view(shape[0], -1)
        return GgufBlocks(kind).expand(stored.view(1, -1), torch.float32).view(shape)

    def _whole_blocks(self, key: str, kind: str) -> bool:
        shape = self.shape(key)
        return len(shape) > 1 and torch.Size(shape[1:]).numel() % GGUF_BLOCKS[kind][0] == 0
