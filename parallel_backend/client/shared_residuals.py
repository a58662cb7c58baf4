"""Puts a ControlNet's residuals into shared memory (shared_memory.py), because they are too large for a pipe.

A segment has the residuals of one micro-step for all ranks of a replica. Each rank copies its part before the first block,
and an output needs all ranks' blocks. So the segment is free when the micro-step's outputs have arrived, without a message.

Ranks page-lock a segment for their own copies; this process does if its ControlNet is on a GPU.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.device_copies import page_locked
from parallel_backend.core.host_memory import host_memory
from parallel_backend.core.pinned import pin
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import RankError
from parallel_backend.wire.shared_memory import Segment, bytes_of_copies, make_segment, sharing_possible

log = logging.getLogger(__name__)

MOST_BYTES = 2 << 30
"""Limit for all segments together. Residuals beyond it are sent over the pipes."""
LEAST_FREE = 4
"""A segment is created only if this multiple of its size is free, because the system kills a process that writes beyond free
memory."""
LEAST_BYTES = 1 << 16
"""A micro-step's residuals below this size are equally fast over the pipes."""


class SharedResiduals:
    """The segments of a model. Not thread-safe: Posting locks."""

    def __init__(self, degrees: Degrees, pool: ModelRanks):
        self._degrees, self._pool = degrees, pool
        self._possible = sharing_possible()
        self._free: list[list[Segment]] = [[] for _ in range(degrees.batch)]  # by replica
        self._used: dict[int, tuple[int, Segment]] = {}  # by micro-step: its replica and segment
        self._unpins: dict[int, Callable[[], None] | None] = {}  # by number of a segment that this process has page-locked
        self._nbytes = 0

    def place(self, replica: int, seq: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the tensors in a segment of the replica's ranks, valid until `done`; or the tensors themselves."""
        nbytes = bytes_of_copies(tensors)
        segment = self._segment(replica, nbytes) if nbytes >= LEAST_BYTES else None
        if segment is None:
            return list(tensors)
        self._used[seq] = replica, segment
        for device in {tensor.device for tensor in tensors}:
            if page_locked(device) and segment.number not in self._unpins:
                self._unpins[segment.number] = pin(segment.memory, device)
        return segment.copies(tensors)

    def done(self, seq: int) -> None:
        """Free the segment of a micro-step. To be called when all its outputs have arrived."""
        if seq in self._used:
            replica, segment = self._used.pop(seq)
            self._free[replica].append(segment)

    def close(self) -> None:
        """Close the segments, because the model leaves the ranks. Ranks keep them mapped until they unload it."""
        self._possible = False
        free = [(replica, segment) for replica, segments in enumerate(self._free) for segment in segments]
        for replica, segment in (*free, *self._used.values()):
            for rank in self._ranks(replica):
                self._pool.forget(rank, segment)
            self._close(segment)
        self._free, self._used = [[] for _ in self._free], {}

    def _ranks(self, replica: int) -> range:
        size = self._degrees.world // self._degrees.batch
        return range(replica * size, (replica + 1) * size)

    def _segment(self, replica: int, nbytes: int) -> Segment | None:
        """Return a free segment that is large enough, or a new one, which replaces a free one that is too small."""
        if not self._possible or not all(self._pool.lends_to(rank) for rank in self._ranks(replica)):
            return None
        free = sorted(self._free[replica], key=lambda segment: segment.nbytes)
        segment = next((segment for segment in free if segment.nbytes >= nbytes), None)
        if segment is not None:
            self._free[replica].remove(segment)
            return segment
        if free:
            self._drop(replica, free[-1])
        return self._make(replica, nbytes)

    def _make(self, replica: int, nbytes: int) -> Segment | None:
        if self._nbytes + nbytes > MOST_BYTES or nbytes > host_memory()[0] // LEAST_FREE:
            return None
        try:
            segment = make_segment(self._pool.next_segment(), nbytes)
        except OSError as error:
            log.warning("Parallel DiT: no memory to share with the ranks (%s): ControlNets go over pipes, slower.", error)
            self._possible = False
            return None
        try:
            for rank in self._ranks(replica):
                self._pool.lend(rank, segment)
        except RankError:
            segment.close()
            raise
        self._nbytes += nbytes
        return segment

    def _drop(self, replica: int, segment: Segment) -> None:
        self._free[replica].remove(segment)
        self._nbytes -= segment.nbytes
        for rank in self._ranks(replica):
            self._pool.drop(rank, segment)
        self._close(segment)

    def _close(self, segment: Segment) -> None:
        if (unpin := self._unpins.pop(segment.number, None)) is not None:
            unpin()
        segment.close()
