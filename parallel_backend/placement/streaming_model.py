"""Seconds of a micro-step some of whose blocks are copied to the device while others compute."""

from collections.abc import Sequence

from parallel_backend.core.block_residency import SLOTS

ROUNDS = 4
"""Micro-steps until a micro-step takes as long as the one before it: copies are at most SLOTS blocks ahead."""


def streamed_seconds(compute: Sequence[float], copies: Sequence[float], gap: float = 0.0) -> float:
    """Seconds from a micro-step's first block to the end of its last block, if micro-steps follow one another.

    `compute`: seconds of a rank's blocks, in their order. `copies`: seconds of each block's copy to the device; 0 for a
    block that stays there. `gap`: seconds between two micro-steps, in which copies go on.

    Blocks are copied one after the other. A copy begins when a slot is free: after the block that is SLOTS before it among
    the streamed ones. So a micro-step takes about max(sum of compute, sum of copies), by groups of blocks.
    """
    if not any(copies):
        return sum(compute)
    now = copied = began = 0.0
    slots = [0.0] * SLOTS  # when each was last computed with, in the order of use
    for _ in range(ROUNDS):
        began = now
        for computing, copying in zip(compute, copies, strict=True):
            if copying:
                copied = max(copied, slots.pop(0)) + copying
                now = max(now, copied)
            now += computing
            if copying:
                slots.append(now)
        now += gap
    return now - gap - began
