"""Ranks on emulated devices of which one is fuller than anybody reckoned: an entry in the place of entry.main."""

import functools
from multiprocessing.connection import Connection

from parallel_backend.rank.start.entry import main
from parallel_backend.wire.rank_settings import RankSettings

from .emulated_device import EmulatedDevice, worker_on

VICTIM = 1
FROM = 2
"""The first of the victim's micro-steps that fails, from 1 on."""


def full(device: EmulatedDevice, always: bool, settings: RankSettings, connection: Connection) -> None:
    """The victim's device runs out of memory while all of its weights are there, or `always`."""
    import torch

    from parallel_backend.rank.engine import Engine

    compute, count = Engine._compute, 0

    def computed(engine, step):
        nonlocal count
        count += 1
        if settings.rank == VICTIM and count >= FROM and (always or not engine.stage.store.streams):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return compute(engine, step)

    Engine._compute = computed
    main(settings, connection, functools.partial(worker_on, device))
