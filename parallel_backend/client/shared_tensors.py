"""Memory shared with all ranks of a pool for a while: for images that the ranks write, and weights that they read."""

import contextlib
import logging
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence

import torch

from parallel_backend.core.host_memory import host_memory
from parallel_backend.processes.pool import RankError
from parallel_backend.processes.pool_part import SomeRanks
from parallel_backend.wire.shared_memory import MAX_SEGMENT_BYTES, Segment, bytes_of_copies, make_segment, sharing_possible

log = logging.getLogger(__name__)


@contextlib.contextmanager
def shared_output(pool: SomeRanks, shape: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, bool]]:
    """An empty tensor that stays valid after the context, and whether all ranks of the pool share its memory within the
    context."""
    with _lent(pool, math.prod(shape) * dtype.itemsize, read=False) as segment:
        if segment is None:
            yield torch.empty(tuple(shape), dtype=dtype), False
        else:
            yield segment.tensor(dtype, list(shape), 0), True


@contextlib.contextmanager
def shared_weights(pool: SomeRanks, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Copies of the tensors in memory that all ranks of the pool share; the tensors themselves if that is not possible.

    CPU ranks compute with that memory, so that all of them together have one copy.
    """
    with _lent(pool, bytes_of_copies(tensors.values()), read=True) as segment:
        yield dict(tensors if segment is None else zip(tensors, segment.copies(tensors.values()), strict=True))


@contextlib.contextmanager
def _lent(pool: SomeRanks, nbytes: int, read: bool) -> Iterator[Segment | None]:
    """A segment that all ranks have open until they have handled the messages of the context. None: not possible.

    `read`: see OpenSegment.
    """
    ranks, free = range(len(pool.devices)), host_memory()[0]
    fits = 0 < nbytes <= MAX_SEGMENT_BYTES and nbytes < free  # the system kills a process that writes beyond free memory
    segment = None
    if fits and sharing_possible() and all(map(pool.lends_to, ranks)):
        try:
            segment = make_segment(secrets.randbits(64), nbytes)
        except OSError as error:
            log.warning("Parallel DiT: no memory to share with the ranks (%s): a VAE's data goes over pipes, slower.", error)
    if segment is None:
        yield None
        return
    lent = []
    try:
        for rank in ranks:
            pool.lend(rank, segment, read=read)
            lent.append(rank)
        yield segment
    finally:
        for rank in lent:
            try:
                pool.drop(rank, segment)
            except RankError:  # the ranks have ended, and with them their views of the segment
                pool.forget(rank, segment)
        segment.close()
