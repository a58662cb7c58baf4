"""Exchange of keys and values between patch ranks in a run of displaced patches (DistriFusion, arXiv 2402.19481).

A stale micro-step goes on with the other patches' keys and values of the call before, and gets this call's for the next one.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from parallel_backend.rank.comm.change_codec import ChangeGathering, Held
from parallel_backend.rank.comm.collectives import Gathering, start_gather

from .context import AttentionContext, AttentionStep, LayerCall
from .gathered import of_axis
from .kv_buffer import Arriving, Piece


class PatchKeys(NamedTuple):
    """What a layer's K/V buffer gets in a micro-step."""

    k_BKhD: torch.Tensor
    v_BKhD: torch.Tensor
    pieces: list[Piece]
    """Of the keys' rows."""
    arriving: Arriving | None
    """What other patches send for the next call."""


def exchange_patches(
    context: AttentionContext,
    at: LayerCall,
    k_BsHD: torch.Tensor,
    v_BsHD: torch.Tensor,
    pieces: Callable[[tuple[int, ...], range], list[Piece]],
) -> PatchKeys:
    """Send this patch's keys and values, and take those of all patches unless the micro-step is stale. Collective over the
    patch axis.

    `pieces`: of the keys of these streams on these sequence ranks, as the tensors have them rank by rank.
    """
    patch, step, streams = context.patch, at.step, at.spec.keys
    assert step.buffer is not None, "outside of a run nothing is kept for the next call"
    own = context.of_patches[patch.index]
    if patch.size == 1:
        return PatchKeys(k_BsHD, v_BsHD, pieces(streams, own), None)
    lengths = of_axis(at.keys, context.of_patches)
    gathering = _start(context, step, at.layer, torch.stack((k_BsHD, v_BsHD)), lengths)
    if step.stale:
        of_others = [[] if each is own else pieces(streams, each) for each in context.of_patches]
        if not step.overlap:
            gathering.wait_pending()
        arriving = Arriving(gathering, of_others, step.entries)
        return PatchKeys(k_BsHD, v_BsHD, pieces(streams, own), arriving)
    parts_2BshD = gathering.wait()
    if context.changes is not None:
        step.buffer.held[at.layer, step.entries] = Held(context.changes, parts_2BshD)
    k_BKHD, v_BKHD = torch.cat(parts_2BshD, dim=2)
    return PatchKeys(k_BKHD, v_BKHD, pieces(streams, range(context.of_patches[-1].stop)), None)


def _start(
    context: AttentionContext, step: AttentionStep, layer: int, kv_2BshD: torch.Tensor, lengths: list[int]
) -> Gathering | ChangeGathering:
    """Start to gather keys and values over the patch ranks, which have `lengths` tokens each.

    Stale micro-steps send only changes, if there is a codec for them and the ranks hold values of an exact call.
    """
    patch, traffic = context.patch, context.traffic
    assert step.buffer is not None
    held = step.buffer.held.get((layer, step.entries)) if step.stale else None
    if held is None or not held.fits([(*kv_2BshD.shape[:2], length, *kv_2BshD.shape[3:]) for length in lengths]):
        return start_gather(kv_2BshD, lengths, 2, patch, traffic)
    return held.start_gather(kv_2BshD, patch, traffic)
