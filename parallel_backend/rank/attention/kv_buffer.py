"""K/V buffers: keys and values of the whole sequence, kept from call to call of a run, for bands at different steps.

A band reads keys and values of bands that have not run in this call yet (PipeFusion), or that run on another rank (displaced
patches). Those are one call old. The buffer extrapolates them along the line through the last two calls, and corrects them
by what the call's first micro-step computes afresh (correction.py). What both bring on the trained mini model:
docs/decisions.md.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from parallel_backend.core.extrapolation import step_ratio
from parallel_backend.core.spans import Span
from parallel_backend.rank.comm.change_codec import ChangeGathering, Held
from parallel_backend.rank.comm.collectives import Gathering

from .correction import key_scale, value_shift

Piece = tuple[Span, Span]
"""(rows of a micro-step's keys, their positions in the buffer)."""


@dataclass
class Arriving:
    """Keys and values of other ranks' tokens, under way."""

    gathering: Gathering | ChangeGathering
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

    def extrapolate(self, weight: torch.Tensor) -> None:
        """Estimate this call's keys and values from those of the last two. `weight`: see KVBuffer.weights."""
        if self.last is None:
            self.last = (self.keys.clone(), self.values.clone())
            return
        for last, now in zip(self.last, (self.keys, self.values), strict=True):
            last.lerp_(now, weight)
        self.swap()

    def swap(self) -> None:
        """What was written over the call before the last is this call's, and this call's so far is the last one's."""
        (self.keys, self.values), self.last = self.last, (self.keys, self.values)

    def write(self, keys: torch.Tensor, values: torch.Tensor, pieces: list[Piece], entries: Span) -> None:
        """Copy rows of [b, n, h, D] to their positions."""
        for rows, positions in pieces:
            self.keys[entries.slice, positions.slice] = keys[:, rows.slice]
            self.values[entries.slice, positions.slice] = values[:, rows.slice]

    def correct(self, keys: torch.Tensor, values: torch.Tensor, pieces: list[Piece], entries: Span, known: Span) -> None:
        """Correct the positions `known` by rows of [b, n, h, D], before these are written over what was expected of them.

        Those outside of `known` were never expected to be anything. Where they are all of it, nothing stays stale.
        """
        expected = [(rows, at) for rows, at in pieces if known.start <= at.start and at.stop <= known.stop]
        if not 0 < sum(len(at) for _, at in expected) < len(known):
            return
        old_keys, old_values = ([kept[entries.slice, at.slice] for _, at in expected] for kept in (self.keys, self.values))
        new_keys, new_values = ([new[:, rows.slice] for rows, _ in expected] for new in (keys, values))
        scale, shift = key_scale(old_keys, new_keys), value_shift(old_values, new_values)
        self.keys[entries.slice, known.slice].mul_(scale)
        self.values[entries.slice, known.slice].add_(shift)

    def commit_received(self) -> None:
        """Wait for what other ranks sent during the last call, and write it."""
        for arrival in self.arriving:
            for (keys, values), pieces in zip(arrival.gathering.wait(), arrival.pieces, strict=True):
                self.write(keys, values, pieces, arrival.entries)
        self.arriving.clear()


class BufferSlot(NamedTuple):
    """Which call a layer has come to, and where its keys and values are. See LayerBuffer."""

    call: int
    keys: torch.Tensor
    values: torch.Tensor
    last: tuple[torch.Tensor, torch.Tensor] | None


@dataclass
class KVBuffer:
    """Buffers of all layers of a stage, for one run and conditioning. Text tokens come first, then the image's.

    A layer's buffer is made when it is first written, since heads and dtype are not known before.
    """

    image_tokens: int
    batch: int
    extrapolate: bool
    """See sampling.OpenRun."""
    correct: bool = True
    """Stale image tokens are corrected by fresh ones. Not where reference tokens are among them, which do not change as the
    image's do."""
    filled: int = 0
    """Image tokens [0, filled) have been written. Without warm-up the first calls read only these."""
    layers: dict[int, LayerBuffer] = field(default_factory=dict)
    held: dict[tuple[int, Span], Held] = field(default_factory=dict)
    """By layer and batch entries, what ranks hold of each other's keys and values where only changes are sent."""
    weights: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    """By dtype of keys and values: how far along the line through the last two calls this call is, 1 being the last. On the
    device, since a CUDA graph would repeat a number of the host's for ever. In bf16 it is rounded, by up to 1/256 (1/128
    from 2 on)."""
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
        for weight in self.weights.values():
            weight.fill_(self._weight)

    @property
    def _weight(self) -> float:
        """See `weights`."""
        return 1.0 if len(self._times) < 3 else 1.0 + step_ratio(*self._times)

    def pattern(self) -> tuple[Hashable, ...]:
        """What `update` goes by on the host: how much is filled, and which layers see this call for the first time."""
        return self.filled, *((layer.call == self._call, layer.last is None) for layer in self.layers.values())

    def addresses(self) -> tuple[int, ...]:
        """Where keys and values are in memory now. LayerBuffer.swap exchanges two places at each call."""
        return tuple(kept.data_ptr() for layer in self.layers.values() for kept in (layer.keys, layer.values))

    def slots(self) -> dict[int, BufferSlot]:
        """By layer."""
        return {
            number: BufferSlot(layer.call, layer.keys, layer.values, layer.last) for number, layer in self.layers.items()
        }

    def follow(self, layers: Iterable[int]) -> None:
        """A CUDA graph has done on the device what `update` does in these layers when they see a call for the first time."""
        for number in layers:
            self.layers[number].call = self._call
            if self.extrapolate:
                self.layers[number].swap()

    def restore(self, slots: Mapping[int, BufferSlot]) -> None:
        """Take back what `update` has done on the host since `slots` was read, where the device has done nothing of it."""
        for number in [number for number in self.layers if number not in slots]:
            del self.layers[number]
        for number, slot in slots.items():
            layer = self.layers[number]
            layer.call, layer.keys, layer.values, layer.last = slot

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
            if self.extrapolate and keys.dtype not in self.weights:
                self.weights[keys.dtype] = keys.new_full((), self._weight)
        buffer = self.layers[layer]
        buffer.commit_received()
        if buffer.call != self._call:
            buffer.call = self._call
            if self.extrapolate:
                buffer.extrapolate(self.weights[keys.dtype])
            if self.correct:
                buffer.correct(keys, values, pieces, entries, Span(text_tokens, text_tokens + filled))
        buffer.write(keys, values, pieces, entries)
        stop = max([text_tokens + filled, *(positions.stop for _, positions in pieces)])
        return buffer.keys[entries.slice, :stop], buffer.values[entries.slice, :stop]

    def add_pending(self, layer: int, arriving: Arriving) -> None:
        """Have the layer write what is arriving at its next call."""
        self.layers[layer].arriving.append(arriving)
