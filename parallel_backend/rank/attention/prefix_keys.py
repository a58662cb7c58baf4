"""Keys and values of a text that later calls read again, in layers over CAUSAL_TEXT: the picture does not change them."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from parallel_backend.core.spans import Span


class LayerKeys(NamedTuple):
    """Keys and values of a layer, after norm and rotary embedding, of the rank's heads from number `first` on."""

    k_BThD: torch.Tensor
    v_BThD: torch.Tensor
    first: int


@dataclass(frozen=True)
class PrefixKeys:
    """Keys and values of a conditioning's whole text on this rank, by layer of its stage.

    `batch`: the conditioning's entries, of which calls may compute a part at a time.
    """

    batch: int
    layers: dict[int, LayerKeys] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(layer.k_BThD.nbytes + layer.v_BThD.nbytes for layer in self.layers.values())

    def put(self, layer: int, k_bThD: torch.Tensor, v_bThD: torch.Tensor, entries: Span, first: int) -> None:
        """Keep the text's keys and values of batch entries `entries`. `first`: number of their first head."""
        if layer not in self.layers:
            shape = (self.batch, *k_bThD.shape[1:])
            self.layers[layer] = LayerKeys(k_bThD.new_empty(shape), v_bThD.new_empty(shape), first)
        kept = self.layers[layer]
        kept.k_BThD[entries.slice], kept.v_BThD[entries.slice] = k_bThD, v_bThD

    def of(self, layer: int, entries: Span, heads: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the keys and the values of `entries`, of heads `heads` of the layer."""
        kept = self.layers[layer]
        of_rank = heads.shift(-kept.first).slice
        return kept.k_BThD[entries.slice, :, of_rank], kept.v_BThD[entries.slice, :, of_rank]
