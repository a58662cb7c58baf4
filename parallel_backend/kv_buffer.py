"""Keys and values of the whole sequence, kept from step to step for one run: what lets bands run at different steps."""

from dataclasses import dataclass, field

import torch

from .layout import Span


@dataclass
class LayerBuffer:
    """One layer's keys and values, [B, text + image, h, D] each, after norm and rotary embedding, this rank's heads."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class KVBuffer:
    """Buffers of all layers of a stage for one set of conditioning; text tokens first, then the image's.

    Layers are made when they are first written, since only then heads and dtype are known. `filled`: image tokens
    [0, filled) have been written. Without warm-up the first round reads only those: never memory that nothing wrote.
    """

    text_tokens: int
    image_tokens: int
    batch: int
    filled: int = 0
    layers: dict[int, LayerBuffer] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers.values())

    def update(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        pieces: list[tuple[Span, Span]],
        entries: Span,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write fresh keys and values [b, n, h, D] in place; return views of all that is filled, [b, text + m, h, D].

        `pieces`: (rows of `keys`, positions in the buffer), in pairs. `entries`: the batch entries that b covers.
        """
        if layer not in self.layers:
            shape = (self.batch, self.text_tokens + self.image_tokens, *keys.shape[2:])
            self.layers[layer] = LayerBuffer(keys.new_empty(shape), values.new_empty(shape))
        buffer = self.layers[layer]
        filled = self.text_tokens + self.filled
        for rows, positions in pieces:
            buffer.keys[entries.slice, positions.slice] = keys[:, rows.slice]
            buffer.values[entries.slice, positions.slice] = values[:, rows.slice]
            filled = max(filled, positions.stop)
        return buffer.keys[entries.slice, :filled], buffer.values[entries.slice, :filled]
