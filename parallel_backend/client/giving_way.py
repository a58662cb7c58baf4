"""Ranks free memory of their device for other programs and models: as much as is asked, and no more.

First they free unused memory of their allocators, then they move weights to host memory, block by block. Adapters are freed
only if that is not enough. The next run brings back the weights that fit (MemoryGuard) and sends adapters again.
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
    """Free `nbytes` of `device` by the ranks on it. Bytes that came free. Waits for micro-steps in progress.

    `adaptation` None: a run is in progress, so adapters stay, and if possible the least that a rank needs to compute.
    """
    on_device = [rank for rank, name in enumerate(ranks.devices) if name == device]
    freed = _release_unused(ranks, on_device, poll)
    if freed >= nbytes:
        return freed
    before = sum(weights.device_bytes[rank] for rank in on_device)
    added = 0 if adaptation is None else sum(adaptation.bytes[rank] for rank in on_device)
    if adaptation is not None and added and before < nbytes - freed:
        adaptation.drop(poll)
        freed += added
    computes = weights.working and adaptation is None
    weights.set(less(weights.device_bytes, on_device, nbytes - freed), poll, computes)
    _release_unused(ranks, on_device, poll)  # until then the allocators keep the memory of the blocks that have left
    return freed + before - sum(weights.device_bytes[rank] for rank in on_device)


def hand_over(weights: ResidentWeights, ranks: Sequence[int], nbytes: int, whole: bool, working: bool) -> int:
    """Free `nbytes` on `ranks`, all on one device, for another model on them, without waiting. Bytes that become free.

    `whole`: weights may not be streamed, so all weights of a rank leave. `working`: this model is used again while the other
    one has the memory, so the least that a rank needs to compute stays.
    """
    before = weights.expected()
    wanted = less(before, ranks, nbytes)
    limits = list(weights.limits)
    for rank in ranks:
        least = weights.weights[rank].least
        if before[rank] and (whole or not weights.working):
            limits[rank] = 0
        elif before[rank]:
            limits[rank] = wanted[rank] if wanted[rank] >= least else least if working else 0
    weights.tell(limits, weights.working)
    after = weights.expected()
    return sum(before[rank] - after[rank] for rank in ranks)


def less(held: Sequence[int], ranks: Sequence[int], nbytes: float) -> tuple[int, ...]:
    """`held` bytes by rank, less `nbytes` in total on `ranks`, each in proportion to its bytes."""
    whole = sum(held[rank] for rank in ranks)
    share = min(1.0, nbytes / whole) if whole else 0.0
    return tuple(max(0, size - math.ceil(size * share)) if rank in ranks else size for rank, size in enumerate(held))


def _release_unused(ranks: ModelRanks, on_device: Sequence[int], poll: Poll) -> int:
    released = wait_for(ranks.ask(ReleaseUnused(), UnusedReleased), poll)
    return sum(reply.freed_bytes for reply in released if reply.rank in on_device)
