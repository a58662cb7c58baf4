"""Ranks of which one fails once: an entry in the place of entry.main. It fails in the next micro-step after a file named
ARMED is in the folder, and never again, since the file is gone then."""

import functools
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from parallel_backend.rank.start.entry import main
from parallel_backend.wire.rank_settings import RankSettings

from .emulated_device import EmulatedDevice, worker_on

ARMED = "armed"
ROOM, RATE = 1 << 30, 1e9


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs() -> NoReturn:
    while True:
        time.sleep(3600)


def _out_of_memory() -> NoReturn:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


FAILURES = {"killed": _killed, "hangs": _hangs, "out of memory": _out_of_memory}


def failing(folder: Path, kind: str, victim: int, settings: RankSettings, connection: Connection) -> None:
    """`kind`: one of FAILURES. All ranks have emulated devices with room for all weights."""
    from parallel_backend.rank.engine import Engine

    compute = Engine._compute

    def computed(engine, step):
        if settings.rank == victim:
            try:
                (folder / ARMED).unlink()
            except FileNotFoundError:
                pass
            else:
                FAILURES[kind]()
        return compute(engine, step)

    Engine._compute = computed
    main(settings, connection, functools.partial(worker_on, EmulatedDevice(ROOM, RATE)))
