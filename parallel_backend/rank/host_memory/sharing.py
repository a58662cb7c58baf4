"""Has ranks of one machine with the same weights find the host memory that they share."""

import logging
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

from parallel_backend.rank.comm.peers import Peers

from .arena import Arena, new_file, open_arena
from .layout import Layout, digest

log = logging.getLogger(__name__)

NOWHERE = 0
"""The machine number of a rank that cannot share."""


class Meeting:
    """Finds the memory file that ranks with the same weights share: that of the first of them on this machine."""

    def __init__(self, ranks: Sequence[int], rank: int, peers: Peers):
        """`ranks`: those with the same weights, including `rank`. Collective over the pool if there are several."""
        self._rank = self._first = rank
        self._handle: int | None = None
        self._file: Sequence[int] = ()  # (process, handle) of the first rank
        if not hasattr(os, "memfd_create"):
            return
        # Every rank makes a file before any knows whose is used: the ranks then need one exchange, and can fall back on
        # their own file if the first rank's cannot be opened.
        try:
            self._handle = new_file()
        except OSError as error:
            log.warning("the system gives no memory to share with other ranks (%s): this one has its own", error)
        else:
            self._close = weakref.finalize(self, os.close, self._handle)  # of a model that failed to load, too
        place = [NOWHERE if self._handle is None else this_machine(), os.getpid(), self._handle or 0]
        places = peers.tell_all(place) if len(ranks) > 1 else {rank: place}
        if self._handle is not None:
            self._first = next(other for other in ranks if other == rank or NOWHERE != places[other][0] == place[0])
            self._file = places[self._first][1:]

    def arena(self, layout: Layout) -> Arena | None:
        """Return the shared memory, or None if the system cannot share. Does not wait for other ranks."""
        if self._handle is None:
            return None
        try:
            return open_arena(layout, *self._file)
        except (OSError, ValueError) as error:
            if self._first == self._rank:
                raise
            log.warning("host memory of rank %d cannot be shared (%s): this rank has its own copy", self._first, error)
        return open_arena(layout, os.getpid(), self._handle)

    def close(self) -> None:
        """Close this rank's file. To be called once all of the ranks have their arena."""
        if self._handle is not None:
            self._close()
            self._handle = None


def this_machine() -> int:
    """63 bits that are equal for processes that see each other's handles. NOWHERE if the system does not show this."""
    if sys.platform != "linux":
        return NOWHERE
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return NOWHERE
    return digest(f"{boot} {processes} {os.getuid()}")
