"""Who shares host memory: ranks of one machine that hold the same weights, and find each other's memory there."""

import hashlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from parallel_backend.rank.comm.peers import Peers

from .arena import Arena, OwnArena, new_file, shared_arena
from .layout import Layout

log = logging.getLogger(__name__)

NOWHERE = 0
"""Machine of a rank that can share with none."""


class Meeting:
    """Ranks with the same weights, as they have found each other."""

    def __init__(self, ranks: Sequence[int], rank: int, peers: Peers):
        """`ranks`: those with the same weights, `rank` among them. Collective over the pool's ranks if they are several."""
        self._rank = self._first = rank
        self._own = self._place = None
        if not hasattr(os, "memfd_create"):
            return
        try:
            self._own = new_file()
        except OSError as error:
            log.warning("the system gives no memory to share with other ranks (%s): this one has its own", error)
        told = [NOWHERE if self._own is None else this_machine(), os.getpid(), self._own or 0]
        everyone = peers.tell_all(told) if len(ranks) > 1 else {rank: told}
        if self._own is not None:
            self._first = next(other for other in ranks if other == rank or NOWHERE != everyone[other][0] == told[0])
            self._place = everyone[self._first][1:]

    def arena(self, layout: Layout) -> Arena:
        """The memory that they share on this machine, or the rank's own where they cannot. Nobody is waited for."""
        if self._place is None:
            return OwnArena(layout)
        try:
            return shared_arena(layout, *self._place)
        except (OSError, ValueError) as error:
            if self._first == self._rank:
                raise
            log.warning("host memory of rank %d cannot be shared (%s): this rank has its own copy", self._first, error)
        return shared_arena(layout, os.getpid(), self._own)

    def close(self) -> None:
        """All of them have their arena."""
        if self._own is not None:
            os.close(self._own)
            self._own = self._place = None


def this_machine() -> int:
    """63 bits that processes which see each other's handles have in common. NOWHERE where that is not known."""
    if sys.platform != "linux":
        return NOWHERE
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return NOWHERE
    text = f"{boot} {processes} {os.getuid()}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
