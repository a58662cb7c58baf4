"""Ranks that do as a file says, inside a block of the mini class: what no message could make them do."""

import functools
import logging
import os
import sys
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

from parallel_backend.rank.start.entry import main
from parallel_backend.wire.rank_settings import RankSettings


def acting(orders: Path, settings: RankSettings, connection: Connection) -> None:
    """A rank's entry, as entry.main. The file `orders` holds a rank's number and what it is to do, such as '1 sleep'."""
    from parallel_backend.quickstart.mini_flux import SingleBlock as Block

    forward, calls = Block.forward, iter(range(1000))

    @functools.wraps(forward)
    def act(*arguments, **named):
        if orders.exists():
            rank, act = orders.read_text().split()
            if settings.rank == int(rank):
                ACTS[act](next(calls))
        return forward(*arguments, **named)

    Block.forward = act
    main(settings, connection)


def sleep(_call: int) -> None:
    while True:
        time.sleep(3600)


def end(_call: int) -> None:
    sys.stdout.write("last words\n")
    os._exit(3)


def crash(_call: int) -> None:
    import faulthandler

    faulthandler._sigsegv()


def run_out(_call: int) -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 1 GiB.")


def speak(_call: int) -> None:
    sys.stdout.write("printed äöü\n")
    logging.getLogger("some.library").info("said quietly")
    logging.getLogger("some.library").warning("said loudly")
    warnings.warn("warned", stacklevel=1)
    os.write(2, b"written by native code\n")


ACTS = {"sleep": sleep, "end": end, "crash": crash, "run_out": run_out, "speak": speak}
