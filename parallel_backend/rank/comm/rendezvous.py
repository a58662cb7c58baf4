"""The file through which the ranks of one machine find each other, at their start and for every group made later."""

import os
from pathlib import Path


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
