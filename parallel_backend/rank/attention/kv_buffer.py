"""Keys and values of the whole sequence, kept from call to call for one run: what lets bands run at different steps.

A band reads the keys and values of other bands that have not run in this call yet (PipeFusion), or run on another rank
(displaced patches). They are a call old; the buffer moves them on along the line through the last two calls
(`extrapolate`), which on the trained mini model brings PipeFusion 15 dB closer to the exact run than using them as they
are (docs/decisions.md).
"""

from dataclasses import dataclass, field

import torch

from parallel_backend.core.extrapolation import step_ratio
from parallel_backend.core.spans import Span
from parallel_backend.rank.comm.collectives import Gathering

Piece = tuple[Span, Span]
"""Rows of a micro-step's keys, and their positions in the buffer."""


@dataclass
class Arriving:
    """Keys and values [2, b, n, h, D] of other ranks' tokens, on their way; `pieces[i]` says where part i belongs."""

    gathering: Gathering
    pieces: list[list[Piece]]
    entries: Span


@dataclass
class LayerBuffer:
    """One layer's keys and values, [B, text + image, h, D] each, after norm and rotary embedding, this rank's heads.

    `last`: (keys, values) of the call before, kept only where there is extrapolation. `arriving`: what other ranks
    computed in this call, to be read in the next.
    """

    keys: torch.Tensor
    values: torch.Tensor
    call: int
    last: tuple[torch.Tensor, torch.Tensor] | None = None
    arriving: list[Arriving] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return (self.keys.nbytes + self.values.nbytes) * (1 if self.last is None else 2)

    def extrapolate(self, call: int, ratio: float) -> None:
        """Once per call: estimate its keys and values from those of the last two."""
        self.call = call
        fresh = (self.keys, self.values)
        if self.last is None:
            self.last = (self.keys.clone(), self.values.clone())
            return
        for last, now in zip(self.last, fresh, strict=True):
            last.lerp_(now, 1 + ratio)
        (self.keys, self.values), self.last = self.last, fresh

    def write(self, keys: torch.Tensor, values: torch.Tensor, pieces: list[Piece], entries: Span) -> None:
        for rows, positions in pieces:
            self.keys[entries.slice, positions.slice] = keys[:, rows.slice]
            self.values[entries.slice, positions.slice] = values[:, rows.slice]

    def commit_received(self) -> None:
        """Wait for what other ranks sent during the last call, and put it in its place."""
        for arrival in self.arriving:
            for (keys, values), pieces in zip(arrival.gathering.wait(), arrival.pieces, strict=True):
                self.write(keys, values, pieces, arrival.entries)
        self.arriving.clear()


@dataclass
class KVBuffer:
    """Buffers of all layers of a stage for one set of conditioning; text tokens first, then the image's.

    Layers are made when they are first written, since only then heads and dtype are known. `filled`: image tokens
    [0, filled) have been written. Without warm-up the first round reads only those: never memory that nothing wrote.
    """

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

    def wait_pending(self) -> None:
        """Wait until nothing is on its way to this buffer any more."""
        for layer in self.layers.values():
            for arrival in layer.arriving:
                arrival.gathering.wait_pending()

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
        return step_ratio(*self._times)

    def update(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        pieces: list[Piece],
        entries: Span,
        text_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write fresh keys and values [b, n, h, D] in place; return views of all that is filled, [b, text + m, h, D].

        `entries`: the batch entries that b covers. `text_tokens`: in front of the image's, 0 in layers without text.
        """
        if layer not in self.layers:
            shape = (self.batch, text_tokens + self.image_tokens, *keys.shape[2:])
            self.layers[layer] = LayerBuffer(keys.new_empty(shape), values.new_empty(shape), self._call)
        buffer = self.layers[layer]
        buffer.commit_received()
        if self.extrapolate and buffer.call != self._call:
            buffer.extrapolate(self._call, self._ratio)
        buffer.write(keys, values, pieces, entries)
        stop = max(text_tokens + self.filled, *(positions.stop for _, positions in pieces))
        return buffer.keys[entries.slice, :stop], buffer.values[entries.slice, :stop]

    def add_pending(self, layer: int, arriving: Arriving) -> None:
        """From the next call on, this layer has what is arriving."""
        self.layers[layer].arriving.append(arriving)
