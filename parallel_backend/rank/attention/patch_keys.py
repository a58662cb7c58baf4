"""Exchange of keys and values between patch ranks in a run of displaced patches (DistriFusion, arXiv 2402.19481).

A stale micro-step goes on with the other patches' keys and values of the call before, and gets this call's for the next one.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from parallel_backend.rank.comm.change_codec import ChangeGathering, Held
from parallel_backend.rank.comm.collectives import Gathering, start_gather

from .context import AttentionContext, AttentionStep
from .kv_buffer import Arriving, Piece


class PatchKeys(NamedTuple):
    """What a layer's K/V buffer gets in a micro-step."""

    k_BKhD: torch.Tensor
    v_BKhD: torch.Tensor
    pieces: list[Piece]
    """Of the keys' rows."""
    arriving: Arriving | None
    """What other patches send for the next call. To be added behind KVBuffer.update, which waits for all that is pending."""


def exchange_patches(
    context: AttentionContext,
    step: AttentionStep,
    layer: int,
    k_BsHD: torch.Tensor,
    v_BsHD: torch.Tensor,
    tokens: Callable[[range], int],
    pieces: Callable[[range], list[Piece]],
) -> PatchKeys:
    """Send this patch's keys and values, and take those of all patches unless the micro-step is stale. Collective over the
    patch axis.

    `tokens`, `pieces`: of these sequence ranks, as the tensors have them rank by rank.
    """
    patch = context.patch
    assert step.buffer is not None, "outside of a run nothing is kept for the next call"
    ranks = [context.patch_ranks(index) for index in range(patch.size)]
    own = ranks[patch.index]
    if patch.size == 1:
        return PatchKeys(k_BsHD, v_BsHD, pieces(own), None)
    gathering = _start(context, step, layer, torch.stack((k_BsHD, v_BsHD)), list(map(tokens, ranks)))
    if step.stale:
        arriving = Arriving(gathering, [[] if each is own else pieces(each) for each in ranks], step.entries)
        if not step.overlap:
            gathering.wait_pending()
        return PatchKeys(k_BsHD, v_BsHD, pieces(own), arriving)
    parts_2BshD = gathering.wait()
    if context.changes is not None:
        step.buffer.held[layer, step.entries] = Held(context.changes, parts_2BshD)
    k_BKHD, v_BKHD = torch.cat(parts_2BshD, dim=2)
    return PatchKeys(k_BKHD, v_BKHD, pieces(range(ranks[-1].stop)), None)


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
