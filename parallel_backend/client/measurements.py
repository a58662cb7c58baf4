"""Asks ranks for measurements. Impossible figures end the ranks, because later code divides by them. Numbers are finite:
messages have no others."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.own_class.calls.tried_calls import conditioning
from parallel_backend.processes.pool import Poll, Pool, wait_for
from parallel_backend.processes.pool_part import SomeRanks
from parallel_backend.wire.diagnosis import PROBE_COLUMNS, PROBE_TEXT, OwnCall, Probe, Probed
from parallel_backend.wire.messages import LinksProbed, ProbeLinks

Reply = TypeVar("Reply", Probed, LinksProbed)


def probe_of(checkpoint: Checkpoint, dtype: str, rows: tuple[int, int]) -> tuple[Probe, tuple[int, int]] | None:
    """Return (the message that has blocks timed, numbers of tokens of its longer and shorter sequence). None: no suitable
    call is known.

    `rows`: numbers of token rows of the two sequences, limited to those of the call with which the class was tried. 32 rows
    are an image of 512 x 512."""
    built = checkpoint.built
    timed = built.timed_calls(rows, PROBE_COLUMNS, PROBE_TEXT)
    tokens = tuple(math.ceil(counts.states / built.hidden) for _, counts in timed)
    if len(set(tokens)) < len(rows):
        return None
    longer, shorter = tokens
    calls = tuple(OwnCall(call.x, call.timestep, conditioning(call)) for call, _ in timed)
    probe = Probe(str(checkpoint.path), dtype, built.own, calls)
    return probe, (longer, shorter)


def measured_blocks(pool: SomeRanks, probe: Probe, lists: Iterable[str], poll: Poll) -> list[Probed]:
    """Return the seconds of the model's blocks, by rank. The ranks drop their models. `lists`: names of the model's block
    lists. Raises RankError for impossible times."""
    names = set(lists)

    def sound(reply: Probed) -> bool:
        pairs = all(len(each) == 2 for each in (*reply.blocks.values(), reply.ends))
        lasted = all(min(times) > 0 for times in reply.blocks.values()) and min(reply.ends) >= 0
        return reply.blocks.keys() == names and pairs and lasted

    return _checked(pool, wait_for(pool.ask(probe, Probed), poll), sound)


def measured_links(pool: Pool, sizes: Sequence[int], poll: Poll) -> list[LinksProbed]:
    """Return the seconds of transfers of `sizes` bytes over each link, by rank. The ranks drop their models. Raises
    RankError for impossible figures."""

    def sound(reply: LinksProbed) -> bool:
        later = sorted(reply.links) == list(range(reply.rank + 1, len(pool.devices)))
        sized = all([size for size, _ in times] == list(sizes) for times in reply.links.values())
        lasted = all(seconds > 0 for times in reply.links.values() for _, seconds in times) and reply.together >= 0
        return later and sized and lasted

    return _checked(pool, wait_for(pool.ask(ProbeLinks(tuple(sizes)), LinksProbed), poll), sound)


def _checked(pool: SomeRanks, replies: list[Reply], sound: Callable[[Reply], bool]) -> list[Reply]:
    for reply in replies:
        if not sound(reply):
            raise pool.refuse(reply.rank, f"measurements that cannot be: {str(reply)[:200]}")
    return replies
