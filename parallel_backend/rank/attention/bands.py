"""Attention of bands, which are at different steps: to the keys in the run's K/V buffer, or to stored keys of the text."""

from typing import Protocol

import torch

from parallel_backend.core.spans import Span, split
from parallel_backend.rank.comm.change_codec import ChangeGathering, Held
from parallel_backend.rank.comm.collectives import Gathering, start_gather

from .context import AttentionContext, Form, LayerCall
from .gathered import of_axis
from .kv_buffer import Arriving, Piece


class Places(Protocol):
    """The positions of the present call's tokens in the K/V buffer."""

    def in_buffer(self, streams: tuple[int, ...], ranks: range) -> tuple[list[Piece], int, bool]:
        """Return (BandTokens.pieces, BandTokens.words, whether some of the streams' tokens are the latent's), for keys of
        these ranks."""


class Bands:
    """Attention in a run with a K/V buffer. `inner`: attends to all keys that are known."""

    def __init__(self, inner: Form, context: AttentionContext, places: Places):
        self._inner, self._context, self._places = inner, context, places
        self._own = context.of_patches[context.patch.index]

    def attend(self, at: LayerCall, q_BQhD: torch.Tensor, k_BshD: torch.Tensor, v_BshD: torch.Tensor) -> torch.Tensor:
        return self._inner.attend(at, q_BQhD, *self._update(at, k_BshD, v_BshD, self._own))

    def _update(
        self, at: LayerCall, k_BshD: torch.Tensor, v_BshD: torch.Tensor, ranks: range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of `ranks` into the buffer. Returns all keys and values that are known, of these
        entries."""
        assert at.step.buffer is not None
        pieces, words, has_latent = self._places.in_buffer(at.spec.keys, ranks)
        known = at.step.buffer.update(at.layer, k_BshD, v_BshD, pieces, at.step.message.entries, words, has_latent)
        if at.mask_bK is not None:
            at.mask_bK = at.mask_bK[:, : known[0].shape[1]]
        return known


class DisplacedPatches(Bands):
    """Bands on several ranks at a time (DistriFusion, arXiv 2402.19481). A stale micro-step uses the other patches' keys and
    values of the previous call, and receives the present ones for the next call."""

    def attend(self, at: LayerCall, q_BQhD: torch.Tensor, k_BshD: torch.Tensor, v_BshD: torch.Tensor) -> torch.Tensor:
        buffer, patches = at.step.buffer, self._context.of_patches
        assert buffer is not None
        gathering = self._start(at, torch.stack((k_BshD, v_BshD)), of_axis(at.keys, patches))
        if at.step.message.stale:
            if not at.step.message.overlap:
                gathering.wait_pending()
            known = self._update(at, k_BshD, v_BshD, self._own)
            pieces = [[] if ranks is self._own else self._places.in_buffer(at.spec.keys, ranks)[0] for ranks in patches]
            # Behind the update, which waits for all that is pending.
            buffer.layers[at.layer].arriving.append(Arriving(gathering, pieces, at.step.message.entries))
        else:
            parts_2BshD = gathering.wait()
            if self._context.changes is not None:
                buffer.held[at.layer, at.step.message.entries] = Held(self._context.changes, parts_2BshD)
            k_BShD, v_BShD = torch.cat(parts_2BshD, dim=2)
            known = self._update(at, k_BShD, v_BShD, range(patches[-1].stop))
        return self._inner.attend(at, q_BQhD, *known)

    def _start(self, at: LayerCall, kv_2BshD: torch.Tensor, lengths: tuple[int, ...]) -> Gathering | ChangeGathering:
        """Start to gather keys and values over the patch ranks, which have `lengths` tokens each. Stale micro-steps send
        only changes, if there is a codec for changes and the ranks hold values of an exact call."""
        patch, traffic = self._context.patch, self._context.traffic
        assert at.step.buffer is not None
        held = at.step.buffer.held.get((at.layer, at.step.message.entries)) if at.step.message.stale else None
        if held is None or not held.fits([(*kv_2BshD.shape[:2], length, *kv_2BshD.shape[3:]) for length in lengths]):
            return start_gather(kv_2BshD, lengths, 2, patch, traffic)
        return held.start_gather(kv_2BshD, patch, traffic)


class WordsOnce:
    """Attention outside of runs if the text is computed only once. `inner`: attends to the stored text and the other
    keys."""

    def __init__(self, inner: Form, context: AttentionContext, places: Places):
        self._inner, self._axis, self._places = inner, context.ulysses, places
        self._ranks = range(context.of_patches[-1].stop)

    def attend(self, at: LayerCall, q_BQhD: torch.Tensor, k_BKhD: torch.Tensor, v_BKhD: torch.Tensor) -> torch.Tensor:
        words, heads = at.step.words, at.heads
        assert words is not None
        if len(heads):
            own = split(Span(0, at.call.q_BQHD.shape[2]), self._axis.size)[self._axis.index]
            times = len(heads) // k_BKhD.shape[2]
            of_keys = Span((heads.start - own.start) // times, (heads.stop - own.start) // times)
            pieces, count, _ = self._places.in_buffer(at.spec.keys, self._ranks)
            fresh = k_BKhD, v_BKhD, pieces, at.step.message.entries
            k_BKhD, v_BKhD = words.update(at.layer, *fresh, count, of_keys, len(own) // times)
        return self._inner.attend(at, q_BQhD, k_BKhD, v_BKhD)
