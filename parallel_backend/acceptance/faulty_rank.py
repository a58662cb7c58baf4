"""A rank whose GPU is stuck in the middle of a run, for the self-test only: a main function that replaces entry.main."""

from multiprocessing.connection import Connection
from unittest import mock

from parallel_backend.wire.rank_settings import RankSettings

AT = 4
"""The micro-step that fails, counted from 1. The watchdog's limit comes from the ones before, which are as long."""
SPIN_CYCLES = 200_000_000_000
"""Cycles of a GPU's clock: about two minutes, if the rank is not ended."""


def main(settings: RankSettings, connection: Connection) -> None:
    """Run the rank. The last rank's GPU spins in a kernel, while its host runs ahead."""
    import torch  # in the rank's process alone

    from parallel_backend.rank.stage_forward import StageForward
    from parallel_backend.rank.start import entry

    compute, count = StageForward.compute, 0

    def computed(*arguments, **named):
        nonlocal count
        count += 1
        if settings.rank == len(settings.devices) - 1 and count == AT:
            torch.cuda._sleep(SPIN_CYCLES)
        return compute(*arguments, **named)

    with mock.patch.object(StageForward, "compute", computed):
        entry.main(settings, connection)
