"""The entry of a rank's process. The client process imports this module too, by name, so it imports nothing heavy."""

import gc
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_backend.wire.rank_settings import RankSettings

from .compiled_code import keep_compiled_code_private
from .environment import set_rank_environment
from .log import write_log
from .parent_watch import end_with_parent

if TYPE_CHECKING:
    from parallel_backend.rank.worker import Worker


def main(settings: RankSettings, connection: Connection, make_worker: "Callable[..., Worker] | None" = None) -> None:
    """Entry of a spawned process, which imports it by this module's name, whatever the pack's folder is called.
    `make_worker`: see worker.run."""
    folder = settings.rendezvous.parent if isinstance(settings.rendezvous, Path) else None
    if folder is not None:
        end_with_parent(folder)
    if settings.log is not None:
        write_log(settings.log, f"rank {settings.rank} ({settings.devices[settings.rank]})")
    set_rank_environment(settings.devices[settings.rank])
    keep_compiled_code_private(scratch=folder)
    from parallel_backend.rank.worker import run

    gc.freeze()  # else each collection visits all objects of torch, at each unloading
    run(settings, connection, make_worker)
