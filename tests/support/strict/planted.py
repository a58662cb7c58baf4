"""Rank threads that do what a test says: for faults that no rank of the product has."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace

from .distributed import StrictDistributed
from .rules import Rules

PATIENCE = 0.5


def on_ranks(
    size: int, work: Callable[[StrictDistributed, int], None], rules: Rules | None = None
) -> list[Exception | None]:
    """`work(dist, rank)` on that many threads: what each has raised. None where it came to its end."""
    dist = StrictDistributed(replace(rules or Rules(), patience=PATIENCE))
    world, errors = dist.world(size), [None] * size

    def run(rank: int) -> None:
        dist.enter(world, rank)
        try:
            work(dist, rank)
            dist.destroy_process_group()
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    with contextlib.ExitStack() as stack:
        stack.callback(world.end)
        for thread in threads:
            thread.join(20 * PATIENCE)
            assert not thread.is_alive(), "the transport hangs"
    return errors
