"""The host's copy of a rank's blocks: in memory, as far as there is some, else read from the file at each use."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.host_memory import LEFT_FREE, host_memory
from parallel_backend.rank.comm.peers import Peers
from parallel_backend.rank.pinned import pinning

from .arena import EMPTY, WRITTEN, Arena
from .layout import Layout
from .sharing import Meeting

log = logging.getLogger(__name__)

Read = Callable[[str, torch.Tensor], None]
"""Reads a block from the checkpoint's files into [nbytes] uint8."""

LOOK_SECONDS = 0.002
"""Between two looks at blocks that other ranks write."""


class HostStore:
    """Blocks as [nbytes] uint8. What is written stays until `close`.

    Ranks of one machine that hold the same blocks have one copy between them. CUDA ranks page-lock theirs. A block that the
    host has no room for is read from the file at each use.
    """

    def __init__(self, rank: int, device: torch.device, degrees: Degrees, checkpoint: Checkpoint, peers: Peers):
        """Collective over all ranks of the pool."""
        self._rank, self._ranks, self._checkpoint, self._peers = rank, degrees.same_weights(rank), checkpoint, peers
        self._meeting = Meeting(self._ranks, rank, peers)
        self._pin = pinning(device)
        self._unpin: dict[str, Callable[[], None]] = {}
        self._sizes: Mapping[str, int] = {}
        self._arena: Arena | None = None
        self._read: Read | None = None
        self._buffer: torch.Tensor | None = None
        self._own: set[str] = set()  # blocks that this rank has written
        self._private: dict[str, torch.Tensor] = {}
        self._own_pins: dict[str, Callable[[], None]] = {}
        self._poor = False  # it has been said that memory is short

    def allot(self, sizes: Mapping[str, int], read: Read) -> None:
        """Once, before all else: `sizes` of all blocks, alike on ranks that hold the same. Takes addresses, no memory."""
        self._sizes, self._read = dict(sizes), read
        self._arena = self._meeting.arena(Layout.of(sizes))

    @property
    def nbytes(self) -> int:
        """Of private blocks, and of those that this rank has written: each counts once over ranks that share it."""
        return sum(self._sizes[name] for name in (*self._own, *self._private))

    def to_write(self, names: Iterable[str]) -> Iterator[str]:
        """Those of `names` that the caller is to write into `tensor`, one after the other; `written` must follow each.

        Nobody has them, and no other rank will write them. They are not all if memory is short: see `source`.
        """
        names = list(names)
        first = len(names) * self._ranks.index(self._rank) // len(self._ranks)  # ranks begin at different ones
        for name in names[first:] + names[:first]:
            if name not in self._private and self._arena.state(name) == EMPTY and self._room(name) and self._claim(name):
                yield name

    def written(self, name: str) -> None:
        """The block is in `tensor`."""
        self._arena.written(name)
        self._own.add(name)

    def fill(self, names: Iterable[str]) -> None:
        """Read those of the blocks from the files that nobody has, as far as there is memory, and wait for the others."""
        names = list(names)
        for name in self.to_write(names):
            self._read_unchanged(name, self.tensor(name))
            self.written(name)
        self.wait(names)

    def wait(self, names: Iterable[str]) -> None:
        """Until other ranks have written what they claimed of these; page-locks all that is there."""
        for name in names:
            state = self._arena.state(name)
            if state not in (EMPTY, WRITTEN):
                with self._peers.blocked():
                    while (state := self._arena.state(name)) not in (EMPTY, WRITTEN):
                        time.sleep(LOOK_SECONDS)
            if state == WRITTEN and name not in self._unpin and name not in self._private:
                self._unpin[name] = self._pin(self.tensor(name))

    def tensor(self, name: str) -> torch.Tensor:
        """The block's place: the same for as long as the model is loaded, but for `private`."""
        return self._private[name] if name in self._private else self._arena.tensor(name)

    def holds(self, name: str) -> bool:
        """Whether the block is in memory."""
        return name in self._private or self._arena.state(name) == WRITTEN

    def private(self, name: str, whole: bool = False) -> torch.Tensor:
        """The block's bytes in memory of this rank alone, its `tensor` from now on: they may be written over.

        `whole`: all of them will be, so that they may be of any content. MemoryError where there is no room for them.
        """
        if name not in self._private:
            if not self._room(name):
                missing = f"{self._sizes[name] / 1e9:.2f} GB of host memory for the merged weights of {name} are not free"
                raise MemoryError(missing)
            own = torch.empty(self._sizes[name], dtype=torch.uint8)
            if not whole and self.holds(name):
                own.copy_(self.tensor(name))
            elif not whole:
                self._read_unchanged(name, own)
            self._private[name] = own
            self._own_pins[name] = self._pin(own)
        return self._private[name]

    def source(self, name: str) -> torch.Tensor:
        """The block's bytes, to be copied from: its `tensor`, or what has just been read from the file into a buffer that
        holds until the next such block is asked for.

        ValueError, naming the file, if it has changed since the model was loaded.
        """
        if not self.holds(name):
            self.fill([name])
        if self.holds(name):
            return self.tensor(name)
        if self._buffer is None:
            self._buffer = torch.empty(max(self._sizes.values()), dtype=torch.uint8)
        buffer = self._buffer[: self._sizes[name]]
        self._read_unchanged(name, buffer)
        return buffer

    def close(self) -> None:
        """Let the memory go: nothing on the device reads from it any more."""
        for unpin in (*self._unpin.values(), *self._own_pins.values()):
            unpin()
        self._unpin, self._own_pins, self._private, self._buffer = {}, {}, {}, None
        self._meeting.close()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _read_unchanged(self, name: str, into: torch.Tensor) -> None:
        self._checkpoint.check_unchanged()  # before: behind the end of a file that was cut is the end of the process
        self._read(name, into)
        self._checkpoint.check_unchanged()

    def _room(self, name: str) -> bool:
        free, needed = host_memory()[0], self._sizes[name]
        if needed + LEFT_FREE <= free:
            return True
        self._short(f"{free / 1e9:.1f} GB are free, {LEFT_FREE / 1e9:.1f} of them for the rest of the machine")
        return False

    def _claim(self, name: str) -> bool:
        try:
            return self._arena.claim(name)
        except MemoryError as error:
            self._short(str(error))
            return False

    def _short(self, why: str) -> None:
        if not self._poor:
            log.warning(
                "host memory is short (%s): blocks that it has no room for are read from disk at each use, slowly. A "
                "smaller weight_dtype, Unload Parallel DiT for models not needed, or fewer other programs leave more.",
                why,
            )
        self._poor = True
