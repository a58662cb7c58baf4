"""Weights in memory that all ranks of a pool share for a while."""

import contextlib
import logging
import secrets
from collections.abc import Iterator, Mapping

import torch

from parallel_backend.core.host_memory import host_memory
from parallel_backend.processes.pool import RankError
from parallel_backend.processes.pool_part import SomeRanks
from parallel_backend.wire.shared_memory import MAX_SEGMENT_BYTES, bytes_of_copies, make_segment, sharing_possible

log = logging.getLogger(__name__)


@contextlib.contextmanager
def shared_weights(pool: SomeRanks, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Copies of the tensors in memory that all ranks of the pool have open until they have handled the messages of the
    context; the tensors themselves if that is not possible.

    CPU ranks compute with that memory, so that all of them together have one copy.
    """
    ranks, nbytes = range(len(pool.devices)), bytes_of_copies(tensors.values())
    # The system kills a process that writes beyond free memory.
    fits = 0 < nbytes <= MAX_SEGMENT_BYTES and nbytes < host_memory()[0]
    segment = None
    if fits and sharing_possible() and all(map(pool.lends_to, ranks)):
        try:
            segment = make_segment(secrets.randbits(64), nbytes)
        except OSError as error:
            log.warning("Parallel DiT: no memory to share with the ranks (%s): a VAE's weights go over pipes.", error)
    if segment is None:
        yield dict(tensors)
        return
    lent = []
    try:
        for rank in ranks:
            pool.lend(rank, segment)
            lent.append(rank)
        yield dict(zip(tensors, segment.copies(tensors.values()), strict=True))
    finally:
        for rank in lent:
            try:
                pool.drop(rank, segment)
            except RankError:  # the ranks have ended, and with them their views of the segment
                pool.forget(rank, segment)
        segment.close()
