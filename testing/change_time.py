"""Files that a test spoils unseen. No program can set when an inode changed, so processes are made to overlook it."""

import functools
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

from parallel_backend.checkpoints import checkpoint, file_state, own_class
from parallel_backend.wire.rank_settings import RankSettings
from testing.emulated_device import EmulatedDevice, enter


def overlook_change_time() -> None:
    """From now on a file of the same size and time of writing is the same file to this process."""
    checkpoint.file_state = own_class.file_state = file_state.file_state = _state


def overlooking(device: EmulatedDevice, settings: RankSettings, connection: Connection) -> None:
    """A rank's entry, as emulated_device.enter."""
    overlook_change_time()
    enter(device, settings, connection)


def rank_entry(device: EmulatedDevice) -> functools.partial:
    """The `entry` of LocalRanks for such ranks."""
    return functools.partial(overlooking, device)


def _state(paths: Iterable[Path]) -> str:
    every = ((path, path.stat()) for path in sorted(set(paths)))
    return " ".join(f"{path.name} {status.st_size} {status.st_mtime_ns}" for path, status in every)
