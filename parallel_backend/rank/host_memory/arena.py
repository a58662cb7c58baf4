"""Memory of the host in which blocks lie: shared by ranks of one machine, or a rank's own.

A shared one is a file in memory without a name, as large as all blocks, whose pages are taken block by block as they are
written. It begins with the layout's digest and a byte of state for each block. Whichever rank comes to a block first writes
it, so that each reads about as much from disk as the others, and ranks may want different blocks.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Protocol

import torch

from parallel_backend.wire.shared_memory import OpenSegment, Segment, open_segment

from .layout import DIGEST_BYTES, Layout

EMPTY, BEING_WRITTEN, WRITTEN = range(3)
"""States of a block. A rank that ends while it writes leaves BEING_WRITTEN behind; the client then ends the others."""


class Arena(Protocol):
    def tensor(self, name: str) -> torch.Tensor:
        """The block's [nbytes] uint8. They mean something once it is written; before, they may be other blocks' too."""
        ...

    def state(self, name: str) -> int:
        """EMPTY, BEING_WRITTEN or WRITTEN."""
        ...

    def claim(self, name: str) -> bool:
        """Whether the caller is to write the block: nobody has it yet. MemoryError if there is no memory for it."""
        ...

    def written(self, name: str) -> None:
        """The block that the caller has claimed is there."""
        ...

    def close(self) -> None:
        """Let it go. The memory goes with its last tensor, on whichever rank."""
        ...


class OwnArena:
    """Memory of one rank, where the system shares none without a name."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._blocks: dict[str, torch.Tensor] = {}
        self._written: set[str] = set()
        self._nowhere: torch.Tensor | None = None

    def tensor(self, name: str) -> torch.Tensor:
        if name in self._blocks:
            return self._blocks[name]
        if self._nowhere is None:  # for parameters that are parked without a copy in memory
            self._nowhere = torch.empty(max(map(len, self._layout.spans.values())), dtype=torch.uint8)
        return self._nowhere[: len(self._layout.spans[name])]

    def state(self, name: str) -> int:
        return WRITTEN if name in self._written else BEING_WRITTEN if name in self._blocks else EMPTY

    def claim(self, name: str) -> bool:
        if name in self._blocks:
            return False
        try:
            self._blocks[name] = torch.empty(len(self._layout.spans[name]), dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        return True

    def written(self, name: str) -> None:
        self._written.add(name)

    def close(self) -> None:
        self._blocks, self._nowhere = {}, None


class SharedArena:
    """One rank's view of memory that ranks share, and that goes with the last of them."""

    def __init__(self, layout: Layout, segment: Segment, lock: int):
        """`lock`: a handle of the segment that no other rank has, by which they exclude each other. It is closed here."""
        self._layout, self._segment, self._lock = layout, segment, lock
        self._states = segment.memory[DIGEST_BYTES : DIGEST_BYTES + len(layout.spans)]

    def check(self, new: bool) -> None:
        """ValueError if it is not for this layout. `new`: it is from now on. The caller has the lock."""
        written = self._segment.memory[:DIGEST_BYTES].view(torch.int64)
        if new:
            written.fill_(self._layout.digest)
        elif int(written) != self._layout.digest:
            raise ValueError("it is for weights in another form")

    def tensor(self, name: str) -> torch.Tensor:
        return self._segment.memory[self._layout.spans[name].slice]

    def state(self, name: str) -> int:
        with self._locked():
            return int(self._states[self._layout.numbers[name]])

    def claim(self, name: str) -> bool:
        number = self._layout.numbers[name]
        with self._locked():
            if self._states[number] != EMPTY:
                return False
            self._states[number] = BEING_WRITTEN
        span = self._layout.spans[name]
        try:
            # Now, where it is an error: later it would be the end of the process.
            if len(span):
                os.posix_fallocate(self._lock, span.start, len(span))
        except OSError as error:
            self._set(name, EMPTY)
            raise MemoryError(str(error)) from error
        return True

    def written(self, name: str) -> None:
        self._set(name, WRITTEN)

    def close(self) -> None:
        os.close(self._lock)

    def _set(self, name: str, state: int) -> None:
        with self._locked():
            self._states[self._layout.numbers[name]] = state

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Between ranks. The system lets go for one that ends in it. Who sees a state also sees what was written before."""
        import fcntl

        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


def new_file() -> int:
    """The handle of a file in memory for `shared_arena`, which is empty yet. OSError where the system refuses one."""
    return os.memfd_create("parallel-dit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def shared_arena(layout: Layout, process: int, handle: int) -> SharedArena:
    """The arena in the file that a process of this user on this machine has as `handle`. Who comes first makes it as large
    as the layout; it then stays so.

    OSError where the system does not let this process have it; ValueError where it was made for another layout.
    """
    import fcntl

    lock = os.open(
        f"/proc/{process}/fd/{handle}", os.O_RDWR | os.O_CLOEXEC
    )  # anew, by each rank: locks are between openings
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new = os.fstat(lock).st_size == 0
        if new:
            os.truncate(lock, layout.nbytes)
            fcntl.fcntl(lock, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        arena = SharedArena(layout, open_segment(OpenSegment(0, layout.nbytes, ""), os.dup(lock)), lock)
        arena.check(new)
        fcntl.flock(lock, fcntl.LOCK_UN)
        return arena
    except BaseException:
        os.close(lock)
        raise
