"""Where the ranks of a pool find each other, at their start and for every group made later: a file on one machine, a server
on several."""

import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


class StoreError(RuntimeError):
    """The file is no longer what it was."""


class StoreFile:
    """Held from before the ranks join to their end. The client makes it, empty, in a directory that only this user can read.

    torch's FileStore opens it by name for each access, makes it anew where it is gone, and reads on from where it was: once
    something that cleans up temporary files has removed it, ranks would wait for each other in the next group's making
    until a watchdog ends them.
    """

    def __init__(self, path: Path):
        self._path, self._size = path, 0
        try:
            self._held = os.open(path, os.O_RDONLY)  # for as long as the process lives
        except FileNotFoundError as error:
            raise self._error("removed") from error

    def check(self) -> None:
        """StoreError if it was removed, replaced or cut."""
        held = os.fstat(self._held)
        try:
            present = os.path.samestat(held, os.stat(self._path))
        except FileNotFoundError:
            present = False
        if not present:
            raise self._error("removed")
        if held.st_size < self._size:
            raise self._error("cut short")
        self._size = held.st_size

    def _error(self, what: str) -> StoreError:
        return StoreError(
            f"the file {self._path}, through which the ranks find each other, was {what}. If something cleans up temporary "
            "files, have it leave folders that begin with parallel-dit alone"
        )


class Rendezvous:
    """The store of `world` ranks: `place` is its file (see StoreFile), or the address of its server. One rank has none.

    `timeout`: how long the store waits for what another rank has yet to write. torch gives a store 5 minutes whatever the
    process group's timeout is, and a communicator is made through the store when it is first used: a later stage's would
    end while the stage before still compiles.
    """

    def __init__(self, place: Path | tuple[str, int], world: int, timeout: timedelta):
        self.address = None if isinstance(place, Path) else place
        self._world, self._meetings = world, 0
        self._file = StoreFile(place) if world > 1 and isinstance(place, Path) else None
        self.store: dist.Store | None = None
        if self._file is not None:
            self.store = dist.FileStore(str(place), world)
        elif world > 1:
            self.store = dist.TCPStore(*place, world, is_master=False, timeout=timeout)
        if self.store is not None:
            self.store.set_timeout(timeout)

    def check(self) -> None:
        """StoreError if the file is not what it was. From any thread."""
        if self._file is not None:
            self._file.check()

    def is_any(self, what: str, own: bool) -> bool:
        """Whether it is so on any rank: `own` on this one. As `meet`, once for each `what`."""
        if self.store is None:
            return own
        self.store.add(what, int(own))
        self.meet()
        return self.store.add(what, 0) > 0

    def meet(self) -> None:
        """Wait until every rank has come here. Collective over all ranks.

        Nothing but the store is used, so that whoever comes late, with a slow disk, is not taken for a link that fails.
        """
        if self.store is None:
            return
        self._meetings += 1
        key = f"meeting {self._meetings}"
        if self.store.add(key, 1) == self._world:
            self.store.set(f"{key} complete", "")
        self.store.wait([f"{key} complete"])
