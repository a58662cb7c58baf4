"""K/V buffers: keys and values of the whole sequence, kept from call to call of a run, for bands at different steps.

A band reads keys and values of bands that have not run in this call yet (PipeFusion), or that run on another rank (displaced
patches). Those are one call old. The buffer extrapolates them along the line through the last two calls. On the trained
mini model that brings PipeFusion 15 dB closer to the exact run than using them unchanged (docs/decisions.md).
"""

from dataclasses import dataclass, field

import torch

from parallel_backend.core.extrapolation import step_ratio
from parallel_backend.core.spans import Span
from parallel_backend.rank.comm.collectives import Gathering

Piece = tuple[Span, Span]
"""(rows of a micro-step's keys, their positions in the buffer)."""


@dataclass
class Arriving:
    """Keys and values of other ranks' tokens, under way."""

    gathering: Gathering
    """[2, b, n, h, D] of each rank."""
    pieces: list[list[Piece]]
    """By rank, where its part belongs."""
    entries: Span
    """Batch entries that b covers."""


@dataclass
class LayerBuffer:
    """One layer's keys and values of this rank's heads, after norm and rotary embedding."""

    keys: torch.Tensor
    """[B, text + image, h, D]."""
    values: torch.Tensor
    """As `keys`."""
    call: int
    """Number of the call that `keys` and `values` were last written or extrapolated for."""
    last: tuple[torch.Tensor, torch.Tensor] | None = None
    """Keys and values of the call before, kept only for extrapolation."""
    arriving: list[Arriving] = field(default_factory=list)
    """What other ranks computed in this call. Read in the next one."""

    @property
    def nbytes(self) -> int:
        return (self.keys.nbytes + self.values.nbytes) * (1 if self.last is None else 2)

    def extrapolate(self, call: int, ratio: float) -> None:
        """Once per call: estimate its keys and values from those of the last two. `ratio`: see extrapolation.step_ratio."""
        self.call = call
        fresh = (self.keys, self.values)
        if self.last is None:
            self.last = (self.keys.clone(), self.values.clone())
            return
        for last, now in zip(self.last, fresh, strict=True):
            last.lerp_(now, 1 + ratio)
        (self.keys, self.values), self.last = self.last, fresh

    def write(self, keys: torch.Tensor, values: torch.Tensor, pieces: list[Piece], entries: Span) -> None:
        """Copy rows of [b, n, h, D] to their positions."""
        for rows, positions in pieces:
            self.keys[entries.slice, positions.slice] = keys[:, rows.slice]
            self.values[entries.slice, positions.slice] = values[:, rows.slice]

    def commit_received(self) -> None:
        """Wait for what other ranks sent during the last call, and write it."""
        for arrival in self.arriving:
            for (keys, values), pieces in zip(arrival.gathering.wait(), arrival.pieces, strict=True):
                self.write(keys, values, pieces, arrival.entries)
        self.arriving.clear()


@dataclass
class KVBuffer:
    """Buffers of all layers of a stage, for one run and conditioning. Text tokens come first, then the image's.

    A layer's buffer is made when it is first written, since heads and dtype are not known before.
    """

    image_tokens: int
    batch: int
    extrapolate: bool
    """See sampling.OpenRun."""
    filled: int = 0
    """Image tokens [0, filled) have been written. Without warm-up the first calls read only these."""
    layers: dict[int, LayerBuffer] = field(default_factory=dict)
    _call: int = 0
    _times: tuple[float, ...] = ()  # timesteps of the last two calls and of the one under way

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    def wait_pending(self) -> None:
        """Wait until no transfer to this buffer is under way."""
        for layer in self.layers.values():
            for arrival in layer.arriving:
                arrival.gathering.wait_pending()

    def begin_call(self, time: float) -> None:
        """A call begins. Calls at the same timestep `time` count as one: heun's second and the next step's first."""
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
        image: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write fresh keys and values [b, n, h, D]. Returns views [b, text + m, h, D] of all that is filled.

        `entries`: batch entries that b covers. `text_tokens`: text tokens before the image's, 0 in layers without text.
        `image`: the image's tokens are there at all.
        """
        image_tokens, filled = (self.image_tokens, self.filled) if image else (0, 0)
        if layer not in self.layers:
            shape = (self.batch, text_tokens + image_tokens, *keys.shape[2:])
            self.layers[layer] = LayerBuffer(keys.new_empty(shape), values.new_empty(shape), self._call)
        buffer = self.layers[layer]
        buffer.commit_received()
        if self.extrapolate and buffer.call != self._call:
            buffer.extrapolate(self._call, self._ratio)
        buffer.write(keys, values, pieces, entries)
        stop = max([text_tokens + filled, *(positions.stop for _, positions in pieces)])
        return buffer.keys[entries.slice, :stop], buffer.values[entries.slice, :stop]

    def add_pending(self, layer: int, arriving: Arriving) -> None:
        """Have the layer write what is arriving at its next call."""
        self.layers[layer].arriving.append(arriving)
