"""Memory that all ranks of a pool have for a while: pictures that they write, weights that they read. Neither is sent."""

import contextlib
import logging
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence

import torch

from parallel_backend.core.host_memory import host_memory
from parallel_backend.processes.pool import Pool, RankError
from parallel_backend.wire.shared_memory import MAX_SEGMENT_BYTES, Segment, bytes_of_copies, make_segment, sharing_possible

log = logging.getLogger(__name__)


@contextlib.contextmanager
def shared_output(pool: Pool, shape: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, bool]]:
    """An empty tensor that outlives the context, and whether all ranks of the pool have its memory too until that ends."""
    with _lent(pool, math.prod(shape) * dtype.itemsize) as segment:
        if segment is None:
            yield torch.empty(tuple(shape), dtype=dtype), False
        else:
            yield segment.tensor(dtype, list(shape), 0), True


@contextlib.contextmanager
def shared_weights(pool: Pool, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors where all ranks of the pool have them; as they are where that is not possible.

    A CPU rank goes on with that memory: one copy does for all.
    """
    with _lent(pool, bytes_of_copies(tensors.values())) as segment:
        yield dict(tensors if segment is None else zip(tensors, segment.copies(tensors.values()), strict=True))


@contextlib.contextmanager
def _lent(pool: Pool, nbytes: int) -> Iterator[Segment | None]:
    """A segment that all ranks have until they have done what they were sent within the context. None: they cannot."""
    ranks, free = range(len(pool.devices)), host_memory()[0]
    fits = 0 < nbytes <= MAX_SEGMENT_BYTES and nbytes < free  # who writes beyond it is killed
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
            pool.lend(rank, segment)
            lent.append(rank)
        yield segment
    finally:
        for rank in lent:
            try:
                pool.drop(rank, segment)
            except RankError:  # the ranks are gone, and what they had with them
                pool.forget(rank, segment)
        segment.close()
