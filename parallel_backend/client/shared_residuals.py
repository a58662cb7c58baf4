"""A ControlNet's residuals in memory that the ranks share: they are too large for a pipe (shared_memory.py).

A segment has what all ranks of a replica need for one micro-step. A rank copies its part out before the micro-step's first
block, and no output of the micro-step is there before each rank has begun its blocks: so the segment is free again once the
outputs are. No message says so, and ranks need not agree.
"""

import logging
from collections.abc import Sequence

import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.host_memory import host_memory
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import RankError
from parallel_backend.wire.shared_memory import Segment, bytes_of_copies, make_segment, sharing_possible

log = logging.getLogger(__name__)

MOST_BYTES = 2 << 30
"""Of all segments together. What does not fit into that travels over the pipes."""
LEAST_FREE = 4
"""Times its size must be free before a segment is made: who writes to memory that is not there is killed."""
LEAST_BYTES = 1 << 16
"""Of a micro-step: less is as fast over the pipes."""


class SharedResiduals:
    """The segments of a model. Not thread-safe: the client locks."""

    def __init__(self, degrees: Degrees, pool: ModelRanks):
        self._degrees, self._pool = degrees, pool
        self._possible = sharing_possible()
        self._free: list[list[Segment]] = [[] for _ in range(degrees.batch)]  # by replica
        self._used: dict[int, tuple[int, Segment]] = {}  # by micro-step: its replica and segment
        self._nbytes = 0

    def place(self, replica: int, seq: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors in a segment that the replica's ranks have, until `done`; as they are where that is not possible."""
        nbytes = bytes_of_copies(tensors)
        segment = self._segment(replica, nbytes) if nbytes >= LEAST_BYTES else None
        if segment is None:
            return list(tensors)
        self._used[seq] = replica, segment
        return segment.copies(tensors)

    def done(self, seq: int) -> None:
        """All outputs of that micro-step are there."""
        if (found := self._used.pop(seq, None)) is not None:
            replica, segment = found
            self._free[replica].append(segment)

    def close(self) -> None:
        """The model is over. Its ranks have segments mapped until they unload it: what is under way stays right."""
        self._possible = False
        free = [(replica, segment) for replica, segments in enumerate(self._free) for segment in segments]
        for replica, segment in (*free, *self._used.values()):
            for rank in self._ranks(replica):
                self._pool.forget(rank, segment)
            segment.close()
        self._free, self._used = [[] for _ in self._free], {}

    def _ranks(self, replica: int) -> range:
        size = self._degrees.world // self._degrees.batch
        return range(replica * size, (replica + 1) * size)

    def _segment(self, replica: int, nbytes: int) -> Segment | None:
        """A free one that is large enough, or a new one, in place of one that is too small if there is one."""
        if not self._possible or not all(self._pool.lends_to(rank) for rank in self._ranks(replica)):
            return None
        free = sorted(self._free[replica], key=lambda segment: segment.nbytes)
        found = next((segment for segment in free if segment.nbytes >= nbytes), None)
        if found is not None:
            self._free[replica].remove(found)
            return found
        if free:
            self._drop(replica, free[-1])
        return self._make(replica, nbytes)

    def _make(self, replica: int, nbytes: int) -> Segment | None:
        free = host_memory()[0]
        if self._nbytes + nbytes > MOST_BYTES or (free is not None and nbytes > free // LEAST_FREE):
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
        segment.close()
