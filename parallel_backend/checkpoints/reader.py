"""Reads a rank's part of the weights from the memory-mapped file: cuts it, and converts or packs it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from parallel_backend.core.device_copies import StagedUpload
from parallel_backend.core.short_text import short
from parallel_backend.core.spans import Shard, Span

from .checkpoint import Checkpoint
from .packed_formats import FP8_KINDS, GGUF_BLOCKS, HALF_KINDS, Fp8, GgufBlocks, Half, Packing
from .quantised_formats import FORMATS, KEPT, Quantised, cut_scale, quantise_int8
from .tensor_files import Entry, MappedFile

PLAIN = ("fp32", "bf16", "fp16", "F64", *FP8_KINDS)
"""Storage formats for which torch has a dtype."""


class Reader:
    """Reads parts of parameters from a checkpoint's file.

    Every part is copied from the mapped file to its final memory, on a device through a little page-locked memory. An
    intermediate copy would leave holes in the heap, which the process keeps after the weights are freed.
    """

    def __init__(self, checkpoint: Checkpoint, file: MappedFile):
        self.checkpoint, self._file = checkpoint, file
        self._upload = StagedUpload()

    def values(self, target: str, dtype: torch.dtype, shard: Shard | None, device: torch.device) -> torch.Tensor:
        """Return the part `shard` of a parameter in `dtype`. It is converted if the file has another format. On the meta
        device the result has only a shape, and nothing is read."""
        out = torch.empty(_resized(self.checkpoint.shape(target), shard), dtype=dtype, device=device)
        if device.type != "meta":
            self.read_values(target, shard, out)
        return out

    def read_values(self, target: str, shard: Shard | None, out: torch.Tensor) -> None:
        """Copy the part `shard` of a parameter into `out`, which has its size, on any device. It is converted to the dtype
        of `out`."""
        entry, shape = self._entry(target), self.checkpoint.shape(target)
        out = out.view(_resized(shape, shard))
        if self.checkpoint.is_enlarged(target):
            out.copy_(part_of(self._enlarged(target, out), shard))
            return
        if entry.dtype in GGUF_BLOCKS or entry.dtype in KEPT:
            if shard is None or self.packable(target, entry.dtype, shard):
                packed, packing = self.packed(target, entry.dtype, shard, out.device)
                out.copy_(packing.expand(packed, out.dtype).view(out.shape))
            else:
                whole = self.values(target, out.dtype, None, out.device)
                torch.cat([whole[:, span.slice] for span in shard.spans], dim=1, out=out)
            return
        if entry.scale is None:
            self._copy(entry, *self._cut(target, shard), out)
            return
        values = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self._copy(entry, *self._cut(target, shard), values)
        if entry.rounded is not None:
            values = values.to(FP8_KINDS[entry.rounded]).float()
        scale = self._scales(target, shard, out.device)["weight_scale"]
        out.copy_(values * scale.view(-1, *(1,) * (len(shape) - 1)))

    def _enlarged(self, target: str, like: torch.Tensor) -> torch.Tensor:
        """Return the complete enlarged parameter: the file's values, and zeros after them."""
        smaller = self.checkpoint.smaller
        assert smaller is not None
        values = Reader(smaller, self._file).values(target, like.dtype, None, like.device)
        whole = like.new_zeros(self.checkpoint.shape(target))
        whole[tuple(map(slice, values.shape))] = values
        return whole

    def packable(self, target: str, storage: str, shard: Shard | None) -> bool:
        """Return whether `packed` can read the part `shard`. A part of columns must begin and end between two blocks."""
        entry = self._entry(target)
        if shard is None or shard.dim == 0 or entry.dtype != storage:
            return True
        packing = _stored(entry)
        return packing is None or all(packing.byte_span(span) is not None for span in shard.spans)

    def packed(
        self, target: str, storage: str, shard: Shard | None, device: torch.device, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Packing]:
        """Return the part `shard` of a matrix as [rows, n] uint8, and its packing. It is rounded if the file has another
        format. `out`: memory for the bytes; None: new memory. On the meta device only scales are read."""
        entry = self._entry(target)
        if entry.dtype != storage or storage in HALF_KINDS:
            return self._rounded(target, storage, shard, device, out)
        packing = self._packing(target, shard, device)
        dim, spans, rows = self._cut(target, shard)
        spans = spans if dim == 0 else [_byte_span(packing, span) for span in spans]
        length = sum(map(len, spans))
        row = Span(0, torch.Size(entry.shape[1:]).numel())
        size = (length, len(_byte_span(packing, row))) if dim == 0 else (len(rows), length)
        out = torch.empty(size, dtype=torch.uint8, device=device) if out is None else out
        if device.type != "meta":
            self._copy(entry, dim, spans, rows, out)
        return out, packing

    def _rounded(
        self, target: str, storage: str, shard: Shard | None, device: torch.device, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, Packing]:
        """Return the same as `packed`, for a format that the file does not have."""
        kinds = HALF_KINDS | FP8_KINDS
        if storage not in kinds:
            assert storage == "int8_tensorwise"
            packed, quantised = quantise_int8(self.values(target, torch.float32, shard, device))
            return packed if out is None else out.copy_(packed), quantised
        packing = Half(storage) if storage in HALF_KINDS else Fp8(storage)
        if out is None:
            return self.values(target, kinds[storage], shard, device).view(torch.uint8), packing
        self.read_values(target, shard, out.view(kinds[storage]))
        return out, packing

    def _packing(self, target: str, shard: Shard | None, device: torch.device) -> Packing:
        """Return how the file packs the part `shard` of a weight, with its scales."""
        entry, scales = self._entry(target), self._scales(target, shard, device)
        packing = _stored(entry)
        if isinstance(packing, Fp8):
            # Plain fp8 is expanded, as by ComfyUI without --fast: its file has no say on the rounding of inputs.
            full_precision = entry.layer is None or entry.layer.full_precision
            return Fp8(packing.kind, scales.get("weight_scale"), scales.get("input_scale"), full_precision)
        assert packing is not None
        return packing.on(scales)

    def _scales(self, target: str, shard: Shard | None, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the scales of the part `shard` of a weight by name, in the layout of Quantised and Fp8."""
        entry = self._entry(target)
        shape = entry.shape[0], torch.Size(entry.shape[1:]).numel()
        dim, spans, all_rows = self._cut(target, shard)
        rows, columns = (spans, [Span(0, shape[1])]) if dim == 0 else ([all_rows], spans)
        layouts = FORMATS[entry.dtype if entry.dtype in KEPT else "float8_e4m3fn"].scales
        block = 1 if entry.layer is None else entry.layer.block
        parts = {}
        for leaf, scale in entry.scales.items():
            part = cut_scale(self.tensor(scale), layouts[leaf].place, block, shape, rows, columns)
            parts[leaf] = part.to(device, copy=True)  # a view of the mapped file would keep all of it open
        return parts

    def _cut(self, target: str, shard: Shard | None) -> tuple[int, list[Span], Span]:
        """Return where the part `shard` is in the file's tensor: its dim, spans along it, and all rows of the parameter."""
        whole = Span(0, self.checkpoint.shape(target)[0])
        return (0, [whole], whole) if shard is None else (shard.dim, list(shard.spans), whole)

    def _entry(self, target: str) -> Entry:
        return self.checkpoint.entries[self.checkpoint.key_map[target]]

    def _copy(self, entry: Entry, dim: int, spans: list[Span], rows: Span, out: torch.Tensor) -> None:
        """Copy spans of a stored tensor (see `_cut`) into `out`, one after the other along `dim`; as bytes if `out` is
        uint8."""
        for span, place in zip(spans, out.split([len(span) for span in spans], dim=dim), strict=True):
            parts = self._rows(entry, span if dim == 0 else rows)
            for part, to in zip(parts, place.split([len(part) for part in parts]), strict=True):
                part = part if dim == 0 else part[:, span.slice]
                self._upload.copy(to, part.view(torch.uint8) if to.dtype == torch.uint8 else part)

    def _rows(self, entry: Entry, rows: Span) -> list[torch.Tensor]:
        """Return rows of a stored tensor, as a list with a view of each piece of the tensor."""
        if not entry.pieces:
            return [self.tensor(entry)[rows.slice]]
        parts, start = [], 0
        for piece, span in entry.pieces:
            first, stop = max(rows.start - start, 0), min(rows.stop - start, len(span))
            if first < stop:
                parts.append(self.tensor(piece)[span.start + first : span.start + stop])
            start += len(span)
        return parts

    def tensor(self, entry: Entry) -> torch.Tensor:
        """Return a tensor as it is stored: a view of the mapped file. The complete file stays open as long as the view
        exists."""
        assert not entry.pieces
        return self._file.tensor(entry)


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[Reader]:
    """A Reader. ValueError at the end of the context if the file has changed since the checkpoint was opened: the tensors
    may be of two models."""
    yield Reader(checkpoint, MappedFile(checkpoint.path))
    checkpoint.check_unchanged()


def values_of(checkpoint: Checkpoint, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return tensors of the file by key, float32 on the CPU, in whatever format they are stored. Raises KeyError for unused
    keys."""
    with reading(checkpoint) as reader:
        return {key: reader.values(checkpoint.targets[key], torch.float32, None, torch.device("cpu")) for key in keys}


def stored_value(checkpoint: Checkpoint, key: str) -> torch.Tensor | None:
    """Return a view of the mapped file in the file's dtype, or None if the file does not have the key. Raises ValueError for
    files in another layout (diffusers), for quantized values and for GGUF's blocks."""
    if (entry := checkpoint.entries.get(key)) is None:
        return None
    if entry.dtype in PLAIN and entry.scale is None and not entry.pieces:
        with reading(checkpoint) as reader:
            return reader.tensor(entry)
    raise ValueError(f"{short(checkpoint.path.name)} does not hold {short(key)} as plain values in ComfyUI's own layout")


def _stored(entry: Entry) -> Packing | None:
    """Return how the file packs a weight, without its scales, or None if it does not pack it."""
    if entry.dtype in KEPT:
        return Quantised(entry.kept_layer, {})
    if entry.dtype in FP8_KINDS:
        return Fp8(entry.dtype)
    return GgufBlocks(entry.dtype) if entry.dtype in GGUF_BLOCKS else None


def _byte_span(packing: Packing, columns: Span) -> Span:
    span = packing.byte_span(columns)
    assert span is not None  # `packable` says so
    return span


def part_of(values: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    """Return the part `shard` of the complete parameter's values."""
    if shard is None:
        return values
    return torch.cat([values.narrow(shard.dim, span.start, len(span)) for span in shard.spans], shard.dim)


def _resized(shape: tuple[int, ...], shard: Shard | None) -> list[int]:
    if shard is None:
        return list(shape)
    return [sum(map(len, shard.spans)) if dim == shard.dim else size for dim, size in enumerate(shape)]
