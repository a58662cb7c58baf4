"""The host's copy of a rank's blocks: in memory if there is room, otherwise read from the file at each use."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.host_memory import room_for_weights
from parallel_backend.rank.comm.peers import Peers

from .arena import EMPTY, WRITTEN, Arena
from .layout import Layout
from .page_locks import PageLocks
from .sharing import Meeting

log = logging.getLogger(__name__)

Read = Callable[[str, torch.Tensor], None]
"""Reads a block from the checkpoint's files into [nbytes] uint8."""

LOOK_SECONDS = 0.002
"""Pause between two checks of the state of a block that another rank writes."""


class HostStore:
    """Blocks as [nbytes] uint8. A written block stays until `close`.

    Ranks of one machine with the same blocks share one copy. CUDA ranks page-lock the blocks that they use, because a GPU
    copies asynchronously only from page-locked memory. A block without room is read from the file at each use.
    """

    _read: Read  # set by `allot`

    def __init__(self, rank: int, device: torch.device, degrees: Degrees, checkpoint: Checkpoint, peers: Peers):
        """Collective over all ranks of the pool."""
        self._rank, self._ranks, self._checkpoint, self._peers = rank, degrees.same_weights(rank), checkpoint, peers
        self._meeting = Meeting(self._ranks, rank, peers)
        self._device, self._page_locks = device, PageLocks(device)
        self._sizes: Mapping[str, int] = {}
        self._arena: Arena | None = None
        self._buffer: torch.Tensor | None = None
        self._written: set[str] = set()  # blocks of the arena that this rank has written
        self._private: dict[str, torch.Tensor] = {}  # all blocks in memory if there is no arena
        self._warned = False

    def allot(self, sizes: Mapping[str, int], read: Read) -> None:
        """Set the blocks and their `sizes`, which must be equal on ranks that share. To be called first, once. Reserves
        addresses, but no memory yet."""
        self._sizes, self._read = dict(sizes), read
        self._arena = self._meeting.arena(Layout.of(sizes))

    @property
    def nbytes(self) -> int:
        """Bytes of private blocks and of blocks that this rank has written, so that a shared block counts on only one
        rank."""
        return sum(self._sizes[name] for name in (*self._written, *self._private))

    def to_write(self, names: Iterable[str]) -> Iterator[str]:
        """Claim those of the blocks `names` that no rank has. The caller must write each into `tensor`, then call `written`.
        If memory is short, some blocks are skipped: see `source`."""
        names = list(names)
        # Ranks begin at different blocks, so that they do not race for the same one while reading from disk.
        first = len(names) * self._ranks.index(self._rank) // len(self._ranks)
        for name in names[first:] + names[:first]:
            if self._state(name) == EMPTY and self._room(name) and self._claim(name):
                yield name

    def written(self, name: str) -> None:
        """Record that the block is in `tensor`."""
        if self._arena is not None:
            self._arena.written(name)
            self._written.add(name)

    def fill(self, names: Iterable[str]) -> None:
        """Read blocks that no rank has from the files, if there is memory. Then wait for blocks that other ranks read."""
        names = list(names)
        for name in self.to_write(names):
            self._read_unchanged(name, self.tensor(name))
            self.written(name)
        self.wait(names)

    def wait(self, names: Iterable[str]) -> None:
        """Wait until other ranks have written the blocks that they claimed. Page-locks all written blocks."""
        for name in names:
            if (state := self._state(name)) not in (EMPTY, WRITTEN):
                with self._peers.blocked():
                    while (state := self._state(name)) not in (EMPTY, WRITTEN):
                        time.sleep(LOOK_SECONDS)
            if state == WRITTEN:
                self.page_lock(name)

    def page_lock(self, name: str) -> None:
        """Page-lock the block's `tensor` if possible. The block must be written, or claimed by this rank."""
        self._page_locks.add(self.tensor(name))

    def tensor(self, name: str) -> torch.Tensor:
        """Return the block's memory. Without an arena, blocks that are not in memory share the buffer."""
        if name in self._private:
            return self._private[name]
        return self._in_buffer(name) if self._arena is None else self._arena.tensor(name)

    def holds(self, name: str) -> bool:
        """Whether the block is in memory."""
        return self._state(name) == WRITTEN

    def private(self, name: str, whole: bool = False) -> torch.Tensor:
        """Return the block's bytes in memory of this rank only, which is its `tensor` from now on. The caller may write to
        them. `whole`: the caller will write all of them, so they are not copied. Raises MemoryError if there is no room."""
        if name not in self._private:
            if not self._room(name):
                missing = f"{self._sizes[name] / 1e9:.2f} GB of host memory for the merged weights of {name} are not free"
                raise MemoryError(missing)
            block = torch.empty(self._sizes[name], dtype=torch.uint8)
            if not whole and self.holds(name):
                block.copy_(self.tensor(name))
            elif not whole:
                self._read_unchanged(name, block)
            self._private[name] = block
            self.page_lock(name)
        return self._private[name]

    def source(self, name: str) -> torch.Tensor:
        """Return the block's bytes as the source of a copy: its `tensor`, or a buffer just read from the file.

        The next call for a block without memory overwrites the buffer. Raises ValueError, naming the file, if the file has
        changed since the model was loaded.
        """
        if not self.holds(name):
            self.fill([name])
        if self.holds(name):
            return self.tensor(name)
        buffer = self._in_buffer(name)
        self._read_unchanged(name, buffer)
        return buffer

    def close(self) -> None:
        """Release the memory. No copy to the device may read from it any more."""
        self._page_locks.close()
        self._private, self._buffer = {}, None
        self._meeting.close()
        if self._arena is not None:
            self._arena.close()
        self._arena = None

    def _state(self, name: str) -> int:
        """Return the block's state, see Arena.state."""
        if name in self._private:
            return WRITTEN
        return EMPTY if self._arena is None else self._arena.state(name)

    def _in_buffer(self, name: str) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(max(self._sizes.values()), dtype=torch.uint8)
        return self._buffer[: self._sizes[name]]

    def _read_unchanged(self, name: str, into: torch.Tensor) -> None:
        # Before reading, since behind the new end of a file that was cut it would end the process (SIGBUS); and after it.
        self._checkpoint.check_unchanged()
        self._read(name, into)
        self._checkpoint.check_unchanged()

    def _room(self, name: str) -> bool:
        room = room_for_weights(self._device)
        if self._sizes[name] <= room:
            return True
        self._warn_of_short_memory(f"{max(0, room) / 1e9:.1f} GB may still be taken by weights")
        return False

    def _claim(self, name: str) -> bool:
        try:
            if self._arena is not None:
                return self._arena.claim(name)
            self._private[name] = torch.empty(self._sizes[name], dtype=torch.uint8)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError if there is no memory
            self._warn_of_short_memory(str(error))
            return False
        return True

    def _warn_of_short_memory(self, why: str) -> None:
        if not self._warned:
            log.warning(
                "host memory is short (%s): blocks that do not fit are read from disk at each use, which is slow. To "
                "free memory, use a smaller weight_dtype, Unload Parallel DiT or fewer other programs.",
                why,
            )
        self._warned = True
