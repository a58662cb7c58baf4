"""The store by which the ranks of a pool find each other, at their start and for every group created later: a file on one
machine, a server on several."""

import copy
import json
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


class StoreError(RuntimeError):
    """Raised if the store's file was removed, replaced or shortened."""


class StoreFile:
    """The file of torch's FileStore. The client creates it, empty, in a directory that only this user can read.

    FileStore opens the file by name for each access, and creates an empty file if it is gone. If a program cleaned up
    temporary files, ranks that create their next group would wait for each other until a watchdog ends them.
    """

    def __init__(self, path: Path):
        self._path, self._size = path, 0
        try:
            self._held = os.open(path, os.O_RDONLY)  # open until the process ends, to compare with the file of the name
        except FileNotFoundError as error:
            raise self._error("removed") from error

    def check(self) -> None:
        """Raise StoreError if the file was removed, replaced or shortened. May be called from any thread."""
        known = self._size  # first: another thread's check may see more of the file than this one, and before this one ends
        held = os.fstat(self._held)
        try:
            present = os.path.samestat(held, os.stat(self._path))
        except FileNotFoundError:
            present = False
        if not present:
            raise self._error("removed")
        if held.st_size < known:
            raise self._error("cut short")
        self._size = max(self._size, held.st_size)

    def _error(self, what: str) -> StoreError:
        return StoreError(
            f"the file {self._path}, through which the ranks find each other, was {what}. If a program cleans up "
            "temporary files, exclude folders whose names begin with parallel-dit"
        )


class Rendezvous:
    """The store of `world` ranks. `place`: its file (see StoreFile), or the address of its server. A single rank has no
    store. `timeout`: how long the store waits for a key that another rank has yet to write."""

    def __init__(self, place: Path | tuple[str, int], world: int, timeout: timedelta):
        self.address = None if isinstance(place, Path) else place
        self._world, self._meetings = world, 0
        self._file: StoreFile | None = None
        self.store: dist.Store | None = None
        if world == 1:
            return
        if isinstance(place, Path):
            self._file = StoreFile(place)
            self.store = dist.FileStore(str(place), world)
        else:
            self.store = dist.TCPStore(place[0], place[1], world, is_master=False, timeout=timeout)
        # A store's default is 5 minutes, whatever the process group's timeout is. Communicators are made through the store
        # at their first transfer, so a later stage's would fail while the stage before still compiles.
        self.store.set_timeout(timeout)

    def check(self) -> None:
        """Raise StoreError if the file was removed, replaced or shortened. May be called from any thread."""
        if self._file is not None:
            self._file.check()

    def part(self, ranks: tuple[int, ...]) -> "Rendezvous":
        """Return the store for these ranks only. This rank must be one of them."""
        part = copy.copy(self)
        part._world, part._meetings = len(ranks), 0
        if self.store is not None:
            part.store = None if len(ranks) == 1 else dist.PrefixStore(f"ranks {ranks}", self.store)
        return part

    def tell_all(self, rank: int, numbers: Sequence[int]) -> list[list[int]]:
        """Return every rank's numbers, in rank order. Collective over all ranks."""
        if self.store is None:
            return [list(numbers)]
        key = f"numbers {self._meetings}"
        self.store.set(f"{key} of {rank}", json.dumps(list(numbers)))
        self.meet()
        return [json.loads(self.store.get(f"{key} of {other}")) for other in range(self._world)]

    def meet(self) -> None:
        """Wait until every rank has called this. Collective over all ranks.

        Uses the store alone: in a transfer, a rank that is late because of a slow disk would look like a failed link.
        """
        if self.store is None:
            return
        self._meetings += 1
        key = f"meeting {self._meetings}"
        if self.store.add(key, 1) == self._world:
            self.store.set(f"{key} complete", "")
        self.store.wait([f"{key} complete"])
