"""Marks on folders that say whether a living process uses them, so that a later process can remove what a killed one left.

The mark is a lock on a file (flock), which the system drops with its last holder, however that ends. A process id would not
do: ids are used again, and a container has its own.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

CLAIM = "in-use"
"""Name of the locked file."""
UNLOCKED = f"{CLAIM}.new"
"""Name of that file until it is locked, so that no process finds it unlocked."""


class Claim:
    """This process's mark on `folder`, until `release`. Where the system has no such locks, such as on some network drives,
    there is no mark, and the folder is never removed by another process."""

    def __init__(self, folder: Path):
        self._path = folder / CLAIM
        self._handle: int | None = None
        try:
            if sys.platform == "win32":
                self._handle = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
            else:
                self._handle = os.open(folder / UNLOCKED, os.O_CREAT | os.O_RDWR, 0o600)
                _lock(self._handle)
                os.replace(folder / UNLOCKED, self._path)
        except OSError:
            self.close()
            (folder / UNLOCKED).unlink(missing_ok=True)

    def release(self) -> None:
        """Take the mark away. Idempotent."""
        if self._handle is not None:
            self.close()
            with contextlib.suppress(OSError):  # removed with the folder, or the disk is gone
                self._path.unlink()

    def close(self) -> None:
        """Close this process's handle. The mark stays while another process has one, as after a fork."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def is_claimed(folder: Path) -> bool:
    """Whether a living process has its mark on the folder."""
    path = folder / CLAIM
    if not path.exists():
        return False
    if sys.platform == "win32":
        try:
            path.unlink()  # not possible while a process has the file open
        except OSError:
            return True
        path.touch()
        return False
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        _lock(handle)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove those of the folders of this user whose mark is of a process that was killed. Those without a mark stay."""
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):  # its process ends, or another one removes it
            # Whose it is comes first: another user's folder says nothing about its files but PermissionError.
            if _is_ours(folder) and (folder / CLAIM).exists() and not is_claimed(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """FileNotFoundError if it is gone."""
    status = folder.lstat()
    return sys.platform == "win32" or status.st_uid == os.geteuid()


def _lock(handle: int) -> None:
    """OSError if another process has the lock."""
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
