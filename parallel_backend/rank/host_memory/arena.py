"""Host memory for blocks that ranks of one machine share.

It is an anonymous file as large as all blocks. Its pages are reserved block by block as blocks are written. It
begins with the layout's digest and a byte of state for each block. The first rank that claims a block writes it. So all
ranks read about equally much from disk, and may need different blocks.
"""

import contextlib
import os
import weakref
from collections.abc import Iterator

import torch

from parallel_backend.wire.shared_memory import OpenSegment, Segment, open_segment

from .layout import DIGEST_BYTES, Layout

EMPTY, BEING_WRITTEN, WRITTEN = range(3)
"""States of a block. A rank that ends while it writes leaves BEING_WRITTEN behind; the client then ends the others."""


class Arena:
    """One rank's view of the memory, which is freed with the last rank's view."""

    def __init__(self, layout: Layout, segment: Segment, lock: int):
        """`lock`: this rank's handle of the segment, which ranks lock to exclude each other. `close` closes it. If a model
        fails to load, it is closed when the arena is freed."""
        self._layout, self._segment, self._lock = layout, segment, lock
        self._close_lock = weakref.finalize(self, os.close, lock)
        self._states = segment.memory[DIGEST_BYTES : DIGEST_BYTES + len(layout.spans)]

    def tensor(self, name: str) -> torch.Tensor:
        """Return the block's memory, [nbytes] uint8."""
        return self._segment.memory[self._layout.spans[name].slice]

    def state(self, name: str) -> int:
        """Return the block's state: EMPTY, BEING_WRITTEN or WRITTEN."""
        with self._locked():
            return int(self._states[self._layout.numbers[name]])

    def claim(self, name: str) -> bool:
        """Whether the block was EMPTY; then the caller must write it. Raises MemoryError if there is no memory for it."""
        number = self._layout.numbers[name]
        with self._locked():
            if self._states[number] != EMPTY:
                return False
            self._states[number] = BEING_WRITTEN
        span = self._layout.spans[name]
        try:
            # Reserve the pages now: a write to a page for which there is no memory would end the process (SIGBUS).
            if len(span):
                os.posix_fallocate(self._lock, span.start, len(span))
        except OSError as error:
            self._set(name, EMPTY)
            raise MemoryError(str(error)) from error
        return True

    def written(self, name: str) -> None:
        """Mark the block, which the caller has claimed and written, as WRITTEN."""
        self._set(name, WRITTEN)

    def close(self) -> None:
        """Release the handle."""
        self._close_lock()

    def _set(self, name: str, state: int) -> None:
        with self._locked():
            self._states[self._layout.numbers[name]] = state

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds a lock that all ranks share. It makes a block's bytes visible to other ranks before its state. If a rank
        ends while it holds the lock, the operating system releases it."""
        import fcntl

        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


def new_file() -> int:
    """Return the handle of an empty anonymous file for `open_arena`. Raises OSError if the system refuses one."""
    return os.memfd_create("parallel-dit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def open_arena(layout: Layout, process: int, handle: int) -> Arena:
    """Return the arena in the file that another process of this user on this machine has open as `handle`.

    The first rank sets the file's size, which then never changes. Raises OSError if this process may not open the file,
    ValueError if the file was created for another layout.
    """
    import fcntl

    # Each rank opens the file again: flock excludes openings of a file, not processes that share one opening.
    lock = os.open(f"/proc/{process}/fd/{handle}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new = os.fstat(lock).st_size == 0
        if new:
            os.truncate(lock, layout.nbytes)
            fcntl.fcntl(lock, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        segment = open_segment(OpenSegment(0, layout.nbytes), os.dup(lock))
        digest = segment.memory[:DIGEST_BYTES].view(torch.int64)
        if new:
            digest.fill_(layout.digest)
        elif int(digest) != layout.digest:
            raise ValueError("it is for weights in a different form")
        fcntl.flock(lock, fcntl.LOCK_UN)
        return Arena(layout, segment, lock)
    except BaseException:
        os.close(lock)
        raise
