"""Which of a rank's blocks stay on its device, and which come there from host memory whenever they are needed.

Ranks place their weights by it, and the client predicts memory and seconds by it.
"""

from collections.abc import Collection, Sequence

SLOTS = 2
"""Places on the device for streamed blocks, each as large as the largest of them: one is computed with, the next arrives."""


def streamed_blocks(sizes: Sequence[int], room: int) -> tuple[int, ...]:
    """Indices of the blocks that are streamed; the others stay. Empty where all fit, or where streaming saves nothing.

    `sizes`: bytes of a rank's blocks, in the order in which they run. `room`: bytes that they may take on the device, slots
    included. As few are streamed as that allows, spread evenly, so that each one's copy has the blocks before it to hide
    behind. All of them where not even that fits.
    """
    if sum(sizes) <= room or least_bytes(sizes) == sum(sizes):
        return ()
    choices = (_spread(count, len(sizes)) for count in range(SLOTS + 1, len(sizes) + 1))
    return next((chosen for chosen in choices if device_bytes(sizes, chosen) <= room), tuple(range(len(sizes))))


def nearest_streamed(sizes: Sequence[int], room: int, now: Sequence[int]) -> tuple[int, ...]:
    """As `streamed_blocks`, where the blocks at the indices `now` are streamed: all of these or some, or all and others.

    No more blocks than needed change their place, which leaves them less evenly spread.
    """
    fresh = streamed_blocks(sizes, room)
    if not 0 < len(fresh) < len(sizes) or not 0 < len(now) < len(sizes):
        return fresh
    chosen = set(now)
    while device_bytes(sizes, sorted(chosen)) > room:
        others = set(range(len(sizes))) - chosen
        if not others:  # a large block among them makes the slots too large
            return fresh
        chosen.add(max(others, key=lambda index: _nearest(index, chosen, len(sizes))))
    while len(chosen) > SLOTS + 1:
        crowded = min(chosen, key=lambda index: _nearest(index, chosen - {index}, len(sizes)))
        if device_bytes(sizes, sorted(chosen - {crowded})) > room:
            break
        chosen.remove(crowded)
    return tuple(sorted(chosen))


def _nearest(index: int, chosen: Collection[int], total: int) -> int:
    """Blocks from one to the nearest of the chosen ones, in a circle."""
    return min(min((index - other) % total, (other - index) % total) for other in chosen)


def device_bytes(sizes: Sequence[int], streamed: Sequence[int]) -> int:
    """Bytes of blocks on the device, slots included, where those at the indices `streamed` are streamed."""
    slot = max((sizes[index] for index in streamed), default=0)
    return sum(sizes) - sum(sizes[index] for index in streamed) + min(SLOTS, len(streamed)) * slot


def least_bytes(sizes: Sequence[int]) -> int:
    """The fewest bytes of the device with which these blocks run: of their slots."""
    return min(sum(sizes), SLOTS * max(sizes, default=0))


def _spread(count: int, total: int) -> tuple[int, ...]:
    """So many of `total` indices, at equal distances as far as they divide."""
    return tuple((2 * number + 1) * total // (2 * count) for number in range(count))
