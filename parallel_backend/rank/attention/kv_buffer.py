"""K/V buffers: keys and values of the whole sequence, kept between the calls of a run, for bands at different steps.

A band reads keys and values of bands that have not run in this call yet (PipeFusion), or that run on another rank (displaced
patches). These are one call old. The buffer extrapolates them linearly from the last two calls, since they change nearly in
proportion to the timestep, and corrects them by the fresh ones of the call's first micro-step (correction.py).
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
    """Other ranks' keys and values whose transfer is in progress."""

    gathering: Gathering | ChangeGathering
    """Gathers [2, b, s, h, D] from each rank."""
    pieces: list[list[Piece]]
    """For each rank, the positions of its rows."""
    entries: Span
    """The b batch entries."""


@dataclass
class LayerBuffer:
    """One layer's keys and values, after norm and rotary embedding. S: text tokens, then image tokens of the sequence."""

    k_BShD: torch.Tensor
    v_BShD: torch.Tensor
    call: int
    """Number of the call for which keys and values were last written or extrapolated."""
    last: tuple[torch.Tensor, torch.Tensor] | None = None
    """Keys and values of the previous call. None unless `extrapolate`."""
    arriving: list[Arriving] = field(default_factory=list)
    """Keys and values that other ranks computed in this call. The next call reads them."""

    @property
    def nbytes(self) -> int:
        return (self.k_BShD.nbytes + self.v_BShD.nbytes) * (1 if self.last is None else 2)

    def extrapolate(self, weight: torch.Tensor) -> None:
        """Extrapolate this call's keys and values from those of the last two. `weight`: see KVBuffer.weights."""
        if self.last is None:
            self.last = (self.k_BShD.clone(), self.v_BShD.clone())
            return
        # The estimate is written over the older of the two calls, which nothing reads any more: no third copy is needed.
        for last, now in zip(self.last, (self.k_BShD, self.v_BShD), strict=True):
            last.lerp_(now, weight)
        self.swap()

    def swap(self) -> None:
        """Exchange the present keys and values with `last`, where this call's estimate was written."""
        assert self.last is not None
        (self.k_BShD, self.v_BShD), self.last = self.last, (self.k_BShD, self.v_BShD)

    def write(self, k_bshD: torch.Tensor, v_bshD: torch.Tensor, pieces: list[Piece], entries: Span) -> None:
        """Copy rows to their positions, for these batch entries."""
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
    """Buffers of all layers of a stage, for one run and conditioning. A layer's buffer is created when it is first written,
    because its heads and dtype are not known before."""

    image_tokens: int
    batch: int
    extrapolate: bool
    """See wire.sampling.OpenRun."""
    correct: bool = True
    """Whether stale image tokens are corrected by fresh ones. False if some belong to references, which change
    differently."""
    filled: int = 0
    """Image tokens [0, filled) have been written. Without warm-up the first calls read only these."""
    layers: dict[int, LayerBuffer] = field(default_factory=dict)
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    """Layer -> [batch, S] bool: which keys are seen. Used if each band only has the mask of its own tokens."""
    held: dict[tuple[int, Span], Held] = field(default_factory=dict)
    """(layer, batch entries) -> the values relative to which changes are sent (ChangeCodec)."""
    weights: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    """dtype of keys and values -> this call's position on the line through the last two calls: 0 is the older, 1 the newer.

    A tensor on the device, because a CUDA graph would repeat a number from the host. bf16 rounds it by up to 1/256, or 1/128
    from 2 on."""
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
        """Begin a call at timestep `time`. Two consecutive calls at the same timestep count as one, such as the second call
        of heun and the first of the next step."""
        if self._times and time == self._times[-1]:
            return
        self._call += 1
        self._times = (*self._times[-2:], time)
        for weight in self.weights.values():
            weight.fill_(self._weight)

    @property
    def _weight(self) -> float:
        """The value for `weights` in this call."""
        return 1.0 if len(self._times) < 3 else 1.0 + step_ratio(*self._times)

    def pattern(self) -> tuple[Hashable, ...]:
        """Everything by which `update` decides on the host: tokens filled, and the layers that this call has not reached
        yet."""
        return self.filled, *((layer.call == self._call, layer.last is None) for layer in self.layers.values())

    def addresses(self) -> tuple[int, ...]:
        """Return the memory addresses of keys and values at present. LayerBuffer.swap exchanges two of them at each call."""
        return tuple(x_BShD.data_ptr() for layer in self.layers.values() for x_BShD in (layer.k_BShD, layer.v_BShD))

    def slots(self) -> dict[int, LayerBuffer]:
        """Return a shallow copy of each layer's buffer, for `restore`."""
        return {number: replace(layer) for number, layer in self.layers.items()}

    def follow(self, layers: Iterable[int]) -> None:
        """Do the host's part of `update` for layers in which a replayed CUDA graph began a call on the device."""
        for number in layers:
            self.layers[number].call = self._call
            if self.extrapolate:
                self.layers[number].swap()

    def restore(self, slots: Mapping[int, LayerBuffer]) -> None:
        """Undo the host's part of `update` since `slots` was read. For a failed capture, in which the device did nothing."""
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
        """Write fresh keys and values of these batch entries. Returns views of all their tokens that are filled.

        `text_tokens`: text tokens before the image's, 0 in layers without text. `image`: whether the layer has image tokens.
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
