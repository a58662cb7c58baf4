"""K/V buffers: keys and values of the whole sequence, kept from call to call of a run, for bands at different steps.

A band reads keys and values of bands that have not run in this call yet (PipeFusion), or that run on another rank (displaced
patches). Those are one call old. The buffer extrapolates them along the line through the last two calls, since they change
nearly in proportion to the timestep, and corrects them by the fresh ones of the call's first micro-step (correction.py).
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

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
    """Keys and values of other ranks' tokens whose transfer is in progress."""

    gathering: Gathering | ChangeGathering
    """Gathers [2, b, s, h, D] of each rank."""
    pieces: list[list[Piece]]
    """For each rank: the places of its part."""
    entries: Span
    """The b batch entries."""


@dataclass
class LayerBuffer:
    """One layer's keys and values, after norm and rotary embedding. S: text, then image tokens of the sequence."""

    k_BShD: torch.Tensor
    v_BShD: torch.Tensor
    call: int
    """Number of the call that keys and values were last written or extrapolated for."""
    last: tuple[torch.Tensor, torch.Tensor] | None = None
    """Keys and values of the call before, kept only for extrapolation."""
    arriving: list[Arriving] = field(default_factory=list)
    """Keys and values that other ranks computed in this call. Read in the next one."""

    @property
    def nbytes(self) -> int:
        return (self.k_BShD.nbytes + self.v_BShD.nbytes) * (1 if self.last is None else 2)

    def extrapolate(self, weight: torch.Tensor) -> None:
        """Estimate this call's keys and values from those of the last two. `weight`: see KVBuffer.weights."""
        if self.last is None:
            self.last = (self.k_BShD.clone(), self.v_BShD.clone())
            return
        # The estimate is written over the older of the two calls, which nothing reads any more: no third copy is needed.
        for last, now in zip(self.last, (self.k_BShD, self.v_BShD), strict=True):
            last.lerp_(now, weight)
        self.swap()

    def swap(self) -> None:
        """`last`, where this call's estimate was written, becomes the present; the present becomes `last`."""
        assert self.last is not None
        (self.k_BShD, self.v_BShD), self.last = self.last, (self.k_BShD, self.v_BShD)

    def write(self, k_bshD: torch.Tensor, v_bshD: torch.Tensor, pieces: list[Piece], entries: Span) -> None:
        """Copy rows to their positions."""
        for rows, positions in pieces:
            self.k_BShD[entries.slice, positions.slice] = k_bshD[:, rows.slice]
            self.v_BShD[entries.slice, positions.slice] = v_bshD[:, rows.slice]

    def correct(self, k_bshD: torch.Tensor, v_bshD: torch.Tensor, pieces: list[Piece], entries: Span, known: Span) -> None:
        """Correct the positions `known`, which have estimates, by fresh rows. To be called before the rows are written."""
        # Rows outside of `known`, such as text, have no estimate to compare with. Where the rows are all of `known`, they
        # overwrite it, and nothing stale is left to correct.
        compared = [(rows, at) for rows, at in pieces if known.start <= at.start and at.stop <= known.stop]
        if not 0 < sum(len(at) for _, at in compared) < len(known):
            return
        of_buffer = self.k_BShD, self.v_BShD
        old_k, old_v = ([x_BShD[entries.slice, at.slice] for _, at in compared] for x_BShD in of_buffer)
        new_k, new_v = ([x_bshD[:, rows.slice] for rows, _ in compared] for x_bshD in (k_bshD, v_bshD))
        scale, shift = key_scale(old_k, new_k), value_shift(old_v, new_v)
        self.k_BShD[entries.slice, known.slice].mul_(scale)
        self.v_BShD[entries.slice, known.slice].add_(shift)

    def commit_received(self) -> None:
        """Wait for the keys and values that other ranks sent during the last call, and write them."""
        for arrival in self.arriving:
            for (k_bshD, v_bshD), pieces in zip(arrival.gathering.wait(), arrival.pieces, strict=True):
                self.write(k_bshD, v_bshD, pieces, arrival.entries)
        self.arriving.clear()


@dataclass
class KVBuffer:
    """Buffers of all layers of a stage, for one run and conditioning.

    A layer's buffer is made when it is first written, since heads and dtype are not known before.
    """

    image_tokens: int
    batch: int
    extrapolate: bool
    """See sampling.OpenRun."""
    correct: bool = True
    """Stale image tokens are corrected by fresh ones. False if some of them are tokens of references, which do not change
    as the image's tokens do."""
    filled: int = 0
    """Image tokens [0, filled) have been written. Without warm-up the first calls read only these."""
    layers: dict[int, LayerBuffer] = field(default_factory=dict)
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    """By layer, [batch, S] bool: which keys may be seen, if each band has the mask of its own tokens alone."""
    held: dict[tuple[int, Span], Held] = field(default_factory=dict)
    """By layer and batch entries: the values that changes are sent relative to (ChangeCodec)."""
    weights: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    """By dtype of keys and values, the point of this call on the line through the last two calls: 0 the older, 1 the newer.

    A tensor on the device, since a CUDA graph would repeat a number of the host at each replay. bf16 rounds it, by up to
    1/256 (1/128 from 2 on)."""
    _call: int = 0
    _times: tuple[float, ...] = ()  # timesteps of the last two calls and of the present one

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    def wait_pending(self) -> None:
        """Wait until no transfer to this buffer is in progress."""
        for layer in self.layers.values():
            for arrival in layer.arriving:
                arrival.gathering.wait_pending()

    def begin_call(self, time: float) -> None:
        """A call begins at timestep `time`.

        Two calls in a row at one timestep count as one, such as the second call of heun and the next step's first.
        """
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
        """All that `update` decides by on the host: tokens filled, and which layers see this call for the first time."""
        return self.filled, *((layer.call == self._call, layer.last is None) for layer in self.layers.values())

    def addresses(self) -> tuple[int, ...]:
        """Where keys and values are in memory now. LayerBuffer.swap exchanges two places at each call."""
        return tuple(x_BShD.data_ptr() for layer in self.layers.values() for x_BShD in (layer.k_BShD, layer.v_BShD))

    def slots(self) -> dict[int, LayerBuffer]:
        """Layer -> the state that `restore` goes back to."""
        return {number: replace(layer) for number, layer in self.layers.items()}

    def follow(self, layers: Iterable[int]) -> None:
        """A replayed CUDA graph began a call in these layers on the device: do the host's part of `update`."""
        for number in layers:
            self.layers[number].call = self._call
            if self.extrapolate:
                self.layers[number].swap()

    def restore(self, slots: Mapping[int, LayerBuffer]) -> None:
        """Undo the host's part of `update` since `slots` was read, for a failed capture: the device has done nothing."""
        self.layers = dict(slots)

    def update(
        self,
        layer: int,
        k_bshD: torch.Tensor,
        v_bshD: torch.Tensor,
        pieces: list[Piece],
        entries: Span,
        text_tokens: int,
        image: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write fresh keys and values of batch entries `entries`. Returns views of these entries' tokens filled so far.

        `text_tokens`: text tokens before the image's, 0 in layers without text. `image`: the layer has keys of image tokens.
        """
        image_tokens, filled = (self.image_tokens, self.filled) if image else (0, 0)
        if layer not in self.layers:
            shape = (self.batch, text_tokens + image_tokens, *k_bshD.shape[2:])
            self.layers[layer] = LayerBuffer(k_bshD.new_empty(shape), v_bshD.new_empty(shape), self._call)
            if self.extrapolate and k_bshD.dtype not in self.weights:
                self.weights[k_bshD.dtype] = k_bshD.new_full((), self._weight)
        buffer = self.layers[layer]
        # In this order: received rows are of the last call, so they belong on the line before it is extrapolated, and the
        # correction compares the estimates with the fresh rows before these overwrite them.
        buffer.commit_received()
        if buffer.call != self._call:
            buffer.call = self._call
            if self.extrapolate:
                buffer.extrapolate(self.weights[k_bshD.dtype])
            if self.correct:
                buffer.correct(k_bshD, v_bshD, pieces, entries, Span(text_tokens, text_tokens + filled))
        buffer.write(k_bshD, v_bshD, pieces, entries)
        stop = max([text_tokens + filled, *(positions.stop for _, positions in pieces)])
        return buffer.k_BShD[entries.slice, :stop], buffer.v_BShD[entries.slice, :stop]

    def add_pending(self, layer: int, arriving: Arriving) -> None:
        """Have the layer write `arriving` at its next call."""
        self.layers[layer].arriving.append(arriving)
