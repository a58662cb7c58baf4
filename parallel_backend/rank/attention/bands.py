"""Attention of bands, which are at different steps: to the keys in the run's K/V buffer, or behind kept keys of words."""

from typing import Protocol

import torch

from parallel_backend.core.spans import Span, split

from .context import AttentionContext, Form, LayerCall
from .kv_buffer import Piece
from .patch_keys import exchange_patches


class Places(Protocol):
    """Where the tokens of the present call are in the buffer."""

    def pieces(self, streams: tuple[int, ...], ranks: range) -> list[Piece]:
        """See BandTokens.pieces."""

    def extent(self, streams: tuple[int, ...]) -> tuple[int, bool]:
        """See BandTokens.words, and whether some of the tokens are the latent's."""


class Bands:
    """The form of a run with a K/V buffer. `inner`: attends to all keys that are known."""

    def __init__(self, inner: Form, context: AttentionContext, places: Places):
        self._inner, self._context, self._places = inner, context, places

    def attend(self, at: LayerCall, q_BQhD: torch.Tensor, k_BshD: torch.Tensor, v_BshD: torch.Tensor) -> torch.Tensor:
        buffer, places, streams = at.step.buffer, self._places, at.spec.keys
        assert buffer is not None
        # Received keys are added behind `update`, which waits for all that is pending.
        *fresh, arriving = exchange_patches(self._context, at, k_BshD, v_BshD, places.pieces)
        k_BKhD, v_BKhD = buffer.update(at.layer, *fresh, at.step.entries, *places.extent(streams))
        if arriving is not None:
            buffer.add_pending(at.layer, arriving)
        if at.mask_bK is not None:
            at.mask_bK = at.mask_bK[:, : k_BKhD.shape[1]]
        return self._inner.attend(at, q_BQhD, k_BKhD, v_BKhD)


class WordsOnce:
    """The form of calls outside of runs whose words run once. `inner`: attends to the words and the other keys."""

    def __init__(self, inner: Form, context: AttentionContext, places: Places, ranks: range):
        """`ranks`: all sequence ranks."""
        self._inner, self._axis, self._places, self._ranks = inner, context.ulysses, places, ranks

    def attend(self, at: LayerCall, q_BQhD: torch.Tensor, k_BKhD: torch.Tensor, v_BKhD: torch.Tensor) -> torch.Tensor:
        words, streams, heads = at.step.words, at.spec.keys, at.heads
        assert words is not None
        if len(heads):
            own = split(Span(0, at.call.q_BQHD.shape[2]), self._axis.size)[self._axis.index]
            times = len(heads) // k_BKhD.shape[2]
            of_keys = Span((heads.start - own.start) // times, (heads.stop - own.start) // times)
            pieces, (count, _) = self._places.pieces(streams, self._ranks), self._places.extent(streams)
            fresh = k_BKhD, v_BKhD, pieces, at.step.entries, count
            k_BKhD, v_BKhD = words.update(at.layer, *fresh, of_keys, len(own) // times)
        return self._inner.attend(at, q_BQhD, k_BKhD, v_BKhD)
