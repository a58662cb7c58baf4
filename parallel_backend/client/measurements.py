"""Asks ranks for measurements. Figures that cannot be true end the ranks, since later code divides by them."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from parallel_backend.processes.pool import Poll, Pool, wait_for
from parallel_backend.wire.diagnosis import Probe, Probed
from parallel_backend.wire.messages import LinksProbed, ProbeLinks

Found = TypeVar("Found", Probed, LinksProbed)


def measured_blocks(pool: Pool, probe: Probe, lists: Iterable[str], poll: Poll) -> list[Probed]:
    """Seconds of the model's blocks, by rank. The ranks lose their model. `lists`: names of the model's block lists.

    RankError for times that cannot be true.
    """
    names = set(lists)

    def sound(found: Probed) -> bool:
        return (
            found.blocks.keys() == names
            and all(len(times) == 2 and all(map(_is_time, times)) for times in found.blocks.values())
            and len(found.ends) == 2
            and all(0 <= seconds < math.inf for seconds in found.ends)
            and (found.free_bytes or 0) >= 0
            and 0 <= found.keeping < math.inf
        )

    return _checked(pool, wait_for(pool.ask(probe, Probed), poll), sound)


def measured_links(pool: Pool, sizes: Sequence[int], poll: Poll) -> list[LinksProbed]:
    """Seconds of transfers of `sizes` bytes over each link, by rank. The ranks lose their model.

    RankError for figures that cannot be true.
    """
    world = len(pool.devices)

    def sound(found: LinksProbed) -> bool:
        return (
            sorted(found.links) == list(range(found.rank + 1, world))
            and all([size for size, _ in times] == list(sizes) for times in found.links.values())
            and all(_is_time(seconds) for times in found.links.values() for _, seconds in times)
            and set(found.peers) <= set(range(world))
            and 0 <= found.together < math.inf
            and min(found.free_bytes or 0, found.total_bytes or 0) >= 0
        )

    return _checked(pool, wait_for(pool.ask(ProbeLinks(tuple(sizes)), LinksProbed), poll), sound)


def _is_time(seconds: float) -> bool:
    return 0 < seconds < math.inf


def _checked(pool: Pool, replies: list[Found], sound: Callable[[Found], bool]) -> list[Found]:
    for reply in replies:
        if not sound(reply):
            raise pool.refuse(reply.rank, f"measurements that cannot be: {str(reply)[:200]}")
    return replies
