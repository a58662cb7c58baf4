"""Ranks hand over memory of their device to whoever needs it there: as much as is asked, and no more.

First goes what their allocators keep for later, then weights, block by block, into host memory; what adapters add, only
where those are not enough. The next run takes the weights back as far as there is room (MemoryGuard), and adapters are sent
again.
"""

import math
from collections.abc import Sequence

from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import Poll, wait_for
from parallel_backend.wire.diagnosis import ReleaseUnused, UnusedReleased

from .lora import Adaptation
from .resident_weights import ResidentWeights


def give_way(
    ranks: ModelRanks, weights: ResidentWeights, adaptation: Adaptation | None, device: str, nbytes: float, poll: Poll
) -> int:
    """Have the ranks on `device` hand over `nbytes` of its memory between them; bytes that came free there.

    Ranks on other devices keep what they have. `adaptation` None: in the middle of a run, in which what adapters add stays,
    and what a rank needs to compute unless nothing else is enough. Waits for micro-steps that are under way.
    """
    own = [rank for rank, name in enumerate(ranks.devices) if name == device]
    freed = _release_unused(ranks, own, poll)
    if freed >= nbytes:
        return freed
    before = sum(weights.device_bytes[rank] for rank in own)
    added = 0 if adaptation is None else sum(adaptation.bytes[rank] for rank in own)
    if adaptation is not None and added and before < nbytes - freed:
        adaptation.drop(poll)
        freed += added
    computes = weights.working and adaptation is None
    weights.set(less(weights.device_bytes, own, nbytes - freed), poll, computes)
    _release_unused(ranks, own, poll)  # blocks that went are in the allocators' reserve until then
    return freed + before - sum(weights.device_bytes[rank] for rank in own)


def hand_over(weights: ResidentWeights, own: Sequence[int], nbytes: int, whole: bool, working: bool) -> int:
    """Have the ranks `own` hand over `nbytes` of weights between them to another model on the same ranks; bytes that come
    free. Nobody waits: ranks do it before what they are sent from now on.

    `whole`: the weights are to be streamed in no case, so that all of a rank's go. `working`: what a rank cannot compute
    without stays, as the other model will not give it back before this one is called again.
    """
    before = weights.expected()
    wanted = less(before, own, nbytes)
    limits = list(weights.limits)
    for rank in own:
        if before[rank]:
            least = weights.weights[rank].least
            if whole or not weights.working:
                limits[rank] = 0
            else:
                limits[rank] = wanted[rank] if wanted[rank] >= least else least if working else 0
    weights.tell(limits, weights.working)
    after = weights.expected()
    return sum(before[rank] - after[rank] for rank in own)


def less(held: Sequence[int], own: Sequence[int], nbytes: float) -> tuple[int, ...]:
    """`held` bytes by rank, with `nbytes` less on the ranks `own` between them, each in proportion to what it has."""
    whole = sum(held[rank] for rank in own)
    share = min(1.0, nbytes / whole) if whole else 0.0
    return tuple(max(0, size - math.ceil(size * share)) if rank in own else size for rank, size in enumerate(held))


def _release_unused(ranks: ModelRanks, own: Sequence[int], poll: Poll) -> int:
    released = wait_for(ranks.ask(ReleaseUnused(), UnusedReleased), poll)
    return sum(reply.freed_bytes for reply in released if reply.rank in own)
