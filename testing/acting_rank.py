"""Ranks that do as a file says, once, in a micro-step: what no message could make them do."""

import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from parallel_backend.rank.start.entry import main
from parallel_backend.wire.rank_settings import RankSettings


def acting(
    orders: Path, settings: RankSettings, connection: Connection, worker: Callable[..., Callable[..., Any]] | None = None
) -> None:
    """A rank's entry, as entry.main. The file `orders` holds a rank's number and what it is to do, such as '1 sleep'. It is
    gone then. `worker`: see entry.main."""
    from parallel_backend.rank.engine import Engine

    compute = Engine._compute

    def computed(*arguments):
        rank, act = read(orders)
        if settings.rank == int(rank):
            orders.unlink()
            ACTS[act]()
        return compute(*arguments)

    Engine._compute = computed
    main(settings, connection, *(() if worker is None else (worker,)))


def read(orders: Path) -> list[str]:
    """The rank's number and what it is to do. Number -1 if there is no order: it may be about to be written, or another rank
    has just removed it."""
    try:
        text = orders.read_text()
    except FileNotFoundError:
        text = ""
    return text.split() or ["-1", ""]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    while True:
        time.sleep(3600)


def end() -> None:
    sys.stdout.write("last words\n")
    os._exit(3)


def crash() -> None:
    import faulthandler

    faulthandler._sigsegv()


def run_out() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nGPU 0 has a total capacity of 1 GiB.")


def speak() -> None:
    sys.stdout.write("printed äöü\n")
    logging.getLogger("some.library").info("said quietly")
    logging.getLogger("some.library").warning("said loudly")
    warnings.warn("warned", stacklevel=1)
    os.write(2, b"written by native code\n")


ACTS = {act.__name__: act for act in (kill, sleep, end, crash, run_out, speak)}
