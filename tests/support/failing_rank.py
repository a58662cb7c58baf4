"""Ranks in which something goes wrong in the middle of a run: entries in the place of entry.main."""

from multiprocessing.connection import Connection

from parallel_backend.rank.start.entry import main
from parallel_backend.wire.rank_settings import RankSettings

VICTIM = 1
AT = 4
"""Which of the victim's micro-steps, from 1 on."""


def _run(settings: RankSettings, connection: Connection, change) -> None:
    """`change(result)` of the victim's micro-step AT takes the place of its result."""
    from parallel_backend.rank.engine import Engine

    compute, count = Engine._compute, 0

    def changed(engine, step):
        nonlocal count
        result = compute(engine, step)
        if settings.rank != VICTIM:
            return result
        count += 1
        return change(result) if count == AT else result

    Engine._compute = changed
    main(settings, connection)


def out_of_memory(settings: RankSettings, connection: Connection) -> None:
    import torch

    def fail(_result):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    _run(settings, connection, fail)
