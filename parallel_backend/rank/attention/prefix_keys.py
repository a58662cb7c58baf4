"""Keys and values of a text that later calls read again, in layers over CAUSAL_TEXT: the picture does not change them.

They may be stored in 8 or 4 bits, as ComfyUI's QwenImage21Cache has it: each token's head is rotated and quantised by itself
(ConvRot, comfy-kitchen's layouts), and widened again for each call that reads it.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from parallel_backend.core.block_changes import KEPT_INT8
from parallel_backend.core.kitchen import kitchen
from parallel_backend.core.packed_values import packs
from parallel_backend.core.spans import Span

ROTATION = 256
"""Largest group of values that are rotated together, as in ComfyUI. A head of 128 has two of 64."""


class _Rows(Protocol):
    """Keys, or values, of a layer: [T, h, D] for each batch entry."""

    @property
    def nbytes(self) -> int: ...

    def put(self, x_bThD: torch.Tensor, entries: Span) -> None: ...

    def of(self, entries: Span, heads: slice) -> torch.Tensor:
        """[b, T, heads, D]"""
        ...


class _Plain:
    """Kept as they are. Puts write into one tensor, which a captured graph reads."""

    def __init__(self, batch: int, like_bThD: torch.Tensor):
        self._rows_BThD = like_bThD.new_empty((batch, *like_bThD.shape[1:]))

    @property
    def nbytes(self) -> int:
        return self._rows_BThD.nbytes

    def put(self, x_bThD: torch.Tensor, entries: Span) -> None:
        self._rows_BThD[entries.slice] = x_bThD

    def of(self, entries: Span, heads: slice) -> torch.Tensor:
        return self._rows_BThD[entries.slice, :, heads]


class _Packed:
    """Quantised by entry, token and head."""

    def __init__(self, stored: str, like_bThD: torch.Tensor):
        tensors = kitchen().tensors
        assert tensors is not None, "PrefixKeys looks"
        self._layout = tensors.TensorWiseINT8Layout if stored == KEPT_INT8 else tensors.TensorCoreConvRotW4A4Layout
        group = ROTATION
        while group > 4 and like_bThD.shape[-1] % group:
            group //= 4
        self._settings: dict[str, Any] = {"convrot_groupsize": group}
        if stored == KEPT_INT8:
            self._settings |= {"is_weight": True, "per_channel": True, "convrot": True}
        self._shape, self._dtype = like_bThD.shape[1:], like_bThD.dtype
        self._packed: dict[int, tuple[torch.Tensor, Any]] = {}  # by entry

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes + settings.scale.nbytes for values, settings in self._packed.values())

    def put(self, x_bThD: torch.Tensor, entries: Span) -> None:
        for entry, x_ThD in zip(range(entries.start, entries.stop), x_bThD, strict=True):
            self._packed[entry] = self._layout.quantize(x_ThD.flatten(0, 1), **self._settings)

    def of(self, entries: Span, heads: slice) -> torch.Tensor:
        rows = (self._layout.dequantize(*self._packed[entry]) for entry in range(entries.start, entries.stop))
        return torch.stack([each.view(self._shape)[:, heads].to(self._dtype) for each in rows])


@dataclass(frozen=True)
class LayerKeys:
    """Keys and values of a layer, after norm and rotary embedding, of the rank's heads from number `first` on."""

    keys: _Rows
    values: _Rows
    first: int


@dataclass(frozen=True)
class PrefixKeys:
    """Keys and values of a conditioning's whole text on this rank, by layer of its stage.

    `batch`: the conditioning's entries, of which calls may compute a part at a time. `stored`: see
    BlockChanges.kept_text. Without comfy-kitchen, and where heads do not fit (`packs`), they are kept as they are.
    """

    batch: int
    stored: str = ""
    layers: dict[int, LayerKeys] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers.values())

    def put(self, layer: int, k_bThD: torch.Tensor, v_bThD: torch.Tensor, entries: Span, first: int) -> None:
        """Keep the text's keys and values of batch entries `entries`. `first`: number of their first head."""
        if layer not in self.layers:
            self.layers[layer] = LayerKeys(self._rows(k_bThD), self._rows(v_bThD), first)
        self.layers[layer].keys.put(k_bThD, entries)
        self.layers[layer].values.put(v_bThD, entries)

    def of(self, layer: int, entries: Span, heads: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values of `entries`, of heads `heads` of the layer: [b, T, heads, D] each."""
        kept = self.layers[layer]
        of_rank = heads.shift(-kept.first).slice
        return kept.keys.of(entries, of_rank), kept.values.of(entries, of_rank)

    def _rows(self, like_bThD: torch.Tensor) -> _Rows:
        if packs(self.stored, like_bThD.shape[-1]) and kitchen().tensors is not None:
            return _Packed(self.stored, like_bThD)
        return _Plain(self.batch, like_bThD)
