"""Decides which of a rank's blocks stay on its device, and which are streamed from host memory each time they are computed.
Ranks place weights by these functions, and the client predicts memory and seconds by them."""

from collections.abc import Collection, Sequence

SLOTS = 2
"""Number of buffers on the device for streamed blocks, each as large as the largest: one block computes while the next
arrives."""


def streamed_blocks(sizes: Sequence[int], room: int) -> tuple[int, ...]:
    """Return the indices of the blocks to stream; the others stay. Empty if all blocks fit, or if streaming saves nothing.

    `sizes`: bytes of a rank's blocks, in the order in which they run. `room`: bytes for them on the device, including slots.
    As few blocks as possible are streamed; all of them if `room` is too small even then. They are spread evenly, so that
    each copy is hidden behind the computation of the blocks before it.
    """
    if sum(sizes) <= room or least_bytes(sizes) == sum(sizes):
        return ()
    choices = (_spread(count, len(sizes)) for count in range(SLOTS + 1, len(sizes) + 1))
    return next((chosen for chosen in choices if device_bytes(sizes, chosen) <= room), tuple(range(len(sizes))))


def nearest_streamed(sizes: Sequence[int], room: int, now: Sequence[int]) -> tuple[int, ...]:
    """Like `streamed_blocks`, for a change from the present streamed blocks, whose indices are `now`. Returns a subset or a
    superset of `now`: as few blocks as possible move, so the streamed ones may be spread less evenly."""
    fresh = streamed_blocks(sizes, room)
    if not 0 < len(fresh) < len(sizes) or not 0 < len(now) < len(sizes):
        return fresh
    chosen = set(now)
    while device_bytes(sizes, sorted(chosen)) > room:
        others = set(range(len(sizes))) - chosen
        if not others:  # a large block among the streamed ones makes the slots too large
            return fresh
        chosen.add(max(others, key=lambda index: _nearest(index, chosen, len(sizes))))
    while len(chosen) > SLOTS + 1:
        crowded = min(chosen, key=lambda index: _nearest(index, chosen - {index}, len(sizes)))
        if device_bytes(sizes, sorted(chosen - {crowded})) > room:
            break
        chosen.remove(crowded)
    return tuple(sorted(chosen))


def _nearest(index: int, chosen: Collection[int], total: int) -> int:
    """Return the distance in blocks from `index` to the nearest chosen block, around the circle of all blocks."""
    return min(min((index - other) % total, (other - index) % total) for other in chosen)


def device_bytes(sizes: Sequence[int], streamed: Sequence[int]) -> int:
    """Bytes of the blocks on the device, including slots, if the blocks at the indices `streamed` are streamed."""
    slot = max((sizes[index] for index in streamed), default=0)
    return sum(sizes) - sum(sizes[index] for index in streamed) + min(SLOTS, len(streamed)) * slot


def least_bytes(sizes: Sequence[int]) -> int:
    """Return the fewest bytes of device memory with which these blocks run: those of the slots."""
    return min(sum(sizes), SLOTS * max(sizes, default=0))


def _spread(count: int, total: int) -> tuple[int, ...]:
    """`count` of `total` indices, spread as evenly as possible."""
    return tuple((2 * number + 1) * total // (2 * count) for number in range(count))
