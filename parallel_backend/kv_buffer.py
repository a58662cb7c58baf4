"""Keys and values of the whole sequence, kept from call to call for one run: what lets bands run at different steps.

A band reads the keys and values of later bands before those have run in this call. They are a call old; the buffer moves
them on along the line through the last two calls (`extrapolate`), which on the trained mini model brings PipeFusion 15
dB closer to the exact run than using them as they are (docs/decisions.md).
"""

from dataclasses import dataclass, field

import torch

from .layout import Span

RATIO_LIMITS = (-1.0, 2.0)
"""How far to extrapolate, in units of the last two calls' distance; -1 is back to the call before."""


@dataclass
class LayerBuffer:
    """One layer's keys and values, [B, text + image, h, D] each, after norm and rotary embedding, this rank's heads.

    `last`: (keys, values) of the call before, kept only where there is extrapolation.
    """

    keys: torch.Tensor
    values: torch.Tensor
    call: int
    last: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return (self.keys.nbytes + self.values.nbytes) * (1 if self.last is None else 2)

    def enter(self, call: int, ratio: float) -> None:
        """Once per call: estimate its keys and values from those of the last two."""
        self.call = call
        fresh = (self.keys, self.values)
        if self.last is None:
            self.last = (self.keys.clone(), self.values.clone())
            return
        for last, now in zip(self.last, fresh, strict=True):
            last.lerp_(now, 1 + ratio)
        (self.keys, self.values), self.last = self.last, fresh


@dataclass
class KVBuffer:
    """Buffers of all layers of a stage for one set of conditioning; text tokens first, then the image's.

    Layers are made when they are first written, since only then heads and dtype are known. `filled`: image tokens
    [0, filled) have been written. Without warm-up the first round reads only those: never memory that nothing wrote.
    """

    text_tokens: int
    image_tokens: int
    batch: int
    extrapolate: bool
    filled: int = 0
    layers: dict[int, LayerBuffer] = field(default_factory=dict)
    _call: int = 0
    _times: tuple[float, ...] = ()  # of the last two calls, and of the one under way

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    def begin_call(self, time: float) -> None:
        """The calls at one timestep count as one: heun's second call and the next step's first are at the same."""
        if self._times and time == self._times[-1]:
            return
        self._call += 1
        self._times = (*self._times[-2:], time)

    @property
    def _ratio(self) -> float:
        if len(self._times) < 3:
            return 0.0
        before, last, now = self._times
        return min(max((now - last) / (last - before), RATIO_LIMITS[0]), RATIO_LIMITS[1])

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
            self.layers[layer] = LayerBuffer(keys.new_empty(shape), values.new_empty(shape), self._call)
        buffer = self.layers[layer]
        if self.extrapolate and buffer.call != self._call:
            buffer.enter(self._call, self._ratio)
        filled = self.text_tokens + self.filled
        for rows, positions in pieces:
            buffer.keys[entries.slice, positions.slice] = keys[:, rows.slice]
            buffer.values[entries.slice, positions.slice] = values[:, rows.slice]
            filled = max(filled, positions.stop)
        return buffer.keys[entries.slice, :filled], buffer.values[entries.slice, :filled]
