"""Reads a rank's part of weights from memory-mapped files: cut, converted or packed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from parallel_backend.core.spans import Shard, Span
from parallel_backend.families.base.family import Source

from .checkpoint import Checkpoint, to_original
from .packed_formats import FP8_KINDS, GGUF_BLOCKS, HALF_KINDS, Fp8, GgufBlocks, Half, Packing
from .quantised_formats import FORMATS, KEPT, Quantised, cut_scale, quantise_int8
from .tensor_files import Entry, open_file


class Reader:
    """Reads parts of parameters from a checkpoint's files. Opens a file when it is first needed.

    Every part is copied straight from the mapped file to its place. A copy in between would leave holes in the heap, which
    the process keeps after the weights are freed.
    """

    def __init__(self, checkpoint: Checkpoint, stack: ExitStack):
        self.checkpoint, self._stack = checkpoint, stack
        self._files: dict[Path, Any] = {}

    def values(self, target: str, dtype: torch.dtype, shard: Shard | None, device: torch.device) -> torch.Tensor:
        """The part `shard` of a parameter in `dtype`, converted if the file has another format.

        On the meta device nothing is read.
        """
        out = torch.empty(_resized(self.checkpoint.shape(target), shard), dtype=dtype, device=device)
        if device.type != "meta":
            self.read_values(target, shard, out)
        return out

    def read_values(self, target: str, shard: Shard | None, out: torch.Tensor) -> None:
        """The part `shard` of a parameter into `out`, which has its size, on any device, converted to its dtype."""
        entry, shape = self._entry(target), self.checkpoint.shape(target)
        out = out.view(_resized(shape, shard))
        if entry.dtype in GGUF_BLOCKS or entry.dtype in KEPT:
            if self.packable(target, entry.dtype, shard):
                packed, packing = self.packed(target, entry.dtype, shard, out.device)
                out.copy_(packing.expand(packed, out.dtype).view(out.shape))
            else:
                whole = self.values(target, out.dtype, None, out.device)
                torch.cat([whole[:, span.slice] for span in shard.spans], dim=1, out=out)
            return
        values = out if entry.scale is None else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        dim, spans, rows = self._cut(target, shard)
        part = self._slices(entry)
        for span, place in zip(spans, values.split([len(span) for span in spans], dim=dim), strict=True):
            place.copy_(part[span.slice] if dim == 0 else part[rows.slice, span.slice])
        if entry.scale is not None:
            out.copy_(values * self._scale(target, shard, out.device).view(-1, *(1,) * (len(shape) - 1)))

    def packable(self, target: str, storage: str, shard: Shard | None) -> bool:
        """Whether `packed` can give the part `shard`. A part of columns must begin and end at a block's border."""
        if shard is None or shard.dim == 0:
            return True
        packing = self._stored(target) if self._entry(target).dtype == storage else None
        return packing is None or all(packing.byte_span(span) is not None for span in shard.spans)

    def packed(
        self, target: str, storage: str, shard: Shard | None, device: torch.device, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Packing]:
        """The part `shard` of a matrix as [rows, n] uint8, and how to expand it. Rounded if the file has another format.

        `out`: where the bytes are put, if not into new memory. On the meta device nothing is read but what is beside them.
        """
        entry = self._entry(target)
        kinds = HALF_KINDS | FP8_KINDS
        if storage in kinds and (entry.dtype != storage or storage in HALF_KINDS):
            packing = Half(storage) if storage in HALF_KINDS else Fp8(storage)
            if out is None:
                return self.values(target, kinds[storage], shard, device).view(torch.uint8), packing
            self.read_values(target, shard, out.view(kinds[storage]))
            return out, packing
        if entry.dtype != storage:
            assert storage == "int8_tensorwise"
            packed, packing = quantise_int8(self.values(target, torch.float32, shard, device))
            return packed if out is None else out.copy_(packed), packing
        packing = self._stored(target)
        if isinstance(packing, Fp8):
            scale = None if entry.scale is None else self._scale(target, shard, device)
            given = entry.scales.get("input_scale")
            given = None if given is None else self.tensor(given).float().view(1, 1).to(device, copy=True)
            # Plain fp8 is expanded, as by ComfyUI without --fast: its file has no say on the rounding of inputs.
            packing = Fp8(storage, scale, given, entry.layer is None or entry.layer.full_precision)
        elif isinstance(packing, Quantised):
            packing = Quantised(entry.layer, self._scales(target, shard, device))
        row = Span(0, torch.Size(entry.shape[1:]).numel())
        dim, spans, rows = self._cut(target, shard)
        spans = spans if dim == 0 else [packing.byte_span(span) for span in spans]
        lengths = [len(span) for span in spans]
        size = (sum(lengths), len(packing.byte_span(row))) if dim == 0 else (len(rows), sum(lengths))
        out = torch.empty(size, dtype=torch.uint8, device=device) if out is None else out
        if device.type == "meta":
            return out, packing
        part = self._slices(entry)
        for span, place in zip(spans, out.split(lengths, dim=dim), strict=True):
            place.copy_((part[span.slice] if dim == 0 else part[rows.slice, span.slice]).view(torch.uint8))
        return out, packing

    def _stored(self, target: str) -> Packing | None:
        """How the file packs a weight, without its scales. None: not at all."""
        entry = self._entry(target)
        if entry.dtype in KEPT:
            return Quantised(entry.layer, {})
        if entry.dtype in FP8_KINDS:
            return Fp8(entry.dtype)
        return GgufBlocks(entry.dtype) if entry.dtype in GGUF_BLOCKS else None

    def _scales(self, target: str, shard: Shard | None, device: torch.device) -> dict[str, torch.Tensor]:
        """What belongs to this part of a weight in one of KEPT, as Quantised has it."""
        entry = self._entry(target)
        dim, spans, rows = self._cut(target, shard)
        rows, columns = (spans, [Span(0, entry.shape[1])]) if dim == 0 else ([rows], spans)
        known = FORMATS[entry.dtype].scales
        parts = {}
        for leaf, there in entry.scales.items():
            part = cut_scale(self.tensor(there), known[leaf].place, entry.layer, entry.shape, rows, columns)
            parts[leaf] = part.to(device, copy=True)  # a view of the mapped file would keep all of it open
        return parts

    def _scale(self, target: str, shard: Shard | None, device: torch.device) -> torch.Tensor:
        """Scale of the part `shard`: float32 [1, 1], or [rows, 1] of its rows."""
        entry = self._entry(target).scale
        scale = self.tensor(entry).float().view(-1, 1)
        if len(scale) > 1:
            dim, spans, rows = self._cut(target, shard)
            scale = torch.cat([scale[span.slice] for span in (spans if dim == 0 else [rows])])
        return scale.to(device, copy=True)  # a view of the mapped file would keep all of it open

    def _cut(self, target: str, shard: Shard | None) -> tuple[int, list[Span], Span]:
        """(dim, spans along it, rows of the whole parameter) of the part `shard`, in the file's tensor."""
        source, count = self.checkpoint.key_map[target], self.checkpoint.shape(target)[0]
        dim, spans = (0, [Span(0, count)]) if shard is None else (shard.dim, list(shard.spans))
        first = 0 if source.rows is None else source.rows.start
        if source.swap_halves:
            assert dim == 0
            spans = [piece.shift(by) for span in spans for piece, by in _halves(span, count // 2)]
        return dim, spans if dim else [span.shift(first) for span in spans], Span(first, first + count)

    def _entry(self, target: str) -> Entry:
        return self.checkpoint.entries[self.checkpoint.key_map[target].key]

    def tensor(self, entry: Entry) -> torch.Tensor:
        """As stored: a view of the mapped file, all of which stays open with it."""
        return self._file(entry).get_tensor(entry.key)

    def _slices(self, entry: Entry) -> Any:
        return self._file(entry).get_slice(entry.key)

    def _file(self, entry: Entry) -> Any:
        if entry.file not in self._files:
            self._files[entry.file] = self._stack.enter_context(open_file(entry.file))
        return self._files[entry.file]


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[Reader]:
    """A Reader whose files are closed at the end of the context. ValueError there if they have changed since the checkpoint
    was opened: what was read is worth nothing."""
    with ExitStack() as stack:
        yield Reader(checkpoint, stack)
        checkpoint.check_unchanged()


def original_values(checkpoint: Checkpoint, prefix: str) -> dict[str, torch.Tensor]:
    """Tensors in original layout whose keys begin with `prefix`, by the rest of the key. float32 on the CPU."""
    key_map = checkpoint.family.file.key_map(checkpoint.config)
    targets = [target for target, source in key_map.items() if source.key.startswith(prefix)]
    with reading(checkpoint) as reader:
        state = {target: reader.values(target, torch.float32, None, torch.device("cpu")) for target in targets}
    original = to_original(checkpoint.family, checkpoint.config, state)
    return {key.removeprefix(prefix): tensor for key, tensor in original.items()}


def text_values(checkpoint: Checkpoint, prefix: str, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of the family's text model whose keys begin with `prefix`, by the rest of the key."""
    keys = checkpoint.text_keys(prefix)
    with reading(replace(checkpoint, key_map={key: Source(key) for key in keys})) as reader:
        return {key.removeprefix(prefix): reader.values(key, dtype, None, device) for key in keys}


def _resized(shape: tuple[int, ...], shard: Shard | None) -> list[int]:
    if shard is None:
        return list(shape)
    return [sum(map(len, shard.spans)) if dim == shard.dim else size for dim, size in enumerate(shape)]


def _halves(span: Span, half: int) -> list[tuple[Span, int]]:
    """(part, shift) of `span` below and from `half` on. Shifts lead to the file, where the halves are exchanged."""
    parts = (
        (Span(min(span.start, half), min(span.stop, half)), half),
        (Span(max(span.start, half), max(span.stop, half)), -half),
    )
    return [(part, by) for part, by in parts if len(part)]
