"""Ranks that fail in the middle of a run, for the self-test alone: main functions in place of entry.main."""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from parallel_backend.rank.start.entry import main
from parallel_backend.wire.rank_settings import RankSettings

AT = 4
"""The micro-step that fails, counted from 1. The watchdog's limit comes from the ones before, which are as long."""
SPIN_CYCLES = 200_000_000_000
"""Of a GPU's clock: about two minutes, if the rank is not ended."""
TOO_MUCH = 1 << 50
"""More bytes than any device has."""


def out_of_memory(settings: RankSettings, connection: Connection) -> None:
    """The last rank asks its device's allocator for TOO_MUCH."""
    _act(settings, connection, lambda torch: torch.empty(TOO_MUCH, dtype=torch.uint8, device=settings.device))


def hang(settings: RankSettings, connection: Connection) -> None:
    """The last rank's main thread stops for an hour."""
    _act(settings, connection, lambda _torch: time.sleep(3600))


def stuck_device(settings: RankSettings, connection: Connection) -> None:
    """The last rank's GPU spins in a kernel, while its host runs ahead."""
    _act(settings, connection, lambda torch: torch.cuda._sleep(SPIN_CYCLES))


def _act(settings: RankSettings, connection: Connection, act: Callable[[Any], object]) -> None:
    """Run the rank; the last rank calls `act` with the module torch, which this module must not import too early."""
    import torch

    from parallel_backend.rank.stage_forward import StageForward

    compute, count = StageForward.compute, 0

    def computed(*arguments, **named):
        nonlocal count
        count += 1
        if settings.rank == len(settings.devices) - 1 and count == AT:
            act(torch)
        return compute(*arguments, **named)

    with mock.patch.object(StageForward, "compute", computed):
        main(settings, connection)
