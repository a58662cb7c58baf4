"""Starting and ending the processes of ranks. The pool speaks to them over their channels, wherever they run."""

import contextlib
import importlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch.distributed
import torch.multiprocessing

from parallel_backend.core.devices import device_kind
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.rank_settings import RankSettings
from parallel_backend.wire.rank_settings import StartSettings as StartSettings

from .rank_log import new_logs, tail

log = logging.getLogger(__name__)

RankEntry = Callable[[RankSettings, Connection], None]

RANK_ENTRY = "parallel_backend.rank.start.entry"
"""Module whose `main` runs a rank. By name: this room and the client's know nothing of what ranks are made of."""
KILL_SECONDS = 5.0
"""For a process that was killed. One that is stuck in a driver does not go, and nobody can help that."""

_MAIN_MODULE = threading.Lock()


class Ranks(Protocol):
    """Processes that were started by StartSettings. `channels`: one to each, in rank order."""

    channels: list[Channel]
    names: tuple[str, ...]
    """What errors call each rank's device."""

    @property
    def pids(self) -> tuple[int, ...]: ...

    @property
    def ends(self) -> Mapping[Any, int]:
        """What multiprocessing.connection.wait can wait for, and which rank has ended when it is ready.

        May be empty: a rank whose channel has ended has ended too, and `how_ended` then says so within half a second.
        """

    def how_ended(self, rank: int) -> str | None:
        """How its process ended, such as 'was killed by signal 9'; None while it lives."""

    def log_tail(self, rank: int) -> str:
        """The last lines of its log; empty where there is none, or nothing in it."""

    def dump(self, rank: int) -> None:
        """Have it add its Python stacks to its log, even if it hangs. Nothing happens where that is not possible."""

    def join(self, seconds: float) -> None:
        """Wait until all have ended, but no longer."""

    def kill(self) -> None:
        """End all by force, and remove whatever they had on this machine. From any thread; idempotent.

        Whoever is blocked in one of the channels is let go by that. The pool closes them.
        """


@contextlib.contextmanager
def clean_main_module() -> Iterator[None]:
    """Spawn makes a child import the parent's `__main__` again, which is ComfyUI's main.py: show it an empty one."""
    with _MAIN_MODULE:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def rank_entry() -> RankEntry:
    """What runs in a rank's process: called with the rank's settings and its end of the control connection."""
    return importlib.import_module(RANK_ENTRY).main


class LocalRanks:
    """Processes of this machine, children of this one. `directory`: theirs alone, which nobody else can read.

    Their logs are in there too, and go away with it, unless the settings say where to keep them. `entry`: what runs in
    each, in the place of `rank_entry`.
    """

    def __init__(self, start: StartSettings, entry: RankEntry | None = None):
        """RuntimeError if this torch has nothing by which ranks speak to each other."""
        if not torch.distributed.is_available():
            raise RuntimeError(
                f"Parallel DiT: torch {torch.__version__} was built without torch.distributed, which ranks need. AMD's "
                "wheels for Windows had none before June 2026: install a newer torch, or run ComfyUI in WSL2."
            )
        if torch.version.hip and "cuda" in map(device_kind, start.devices):
            log.warning("Parallel DiT: ranks on AMD GPUs (ROCm) have never been tried. What happens is worth an issue")
        self.directory = Path(tempfile.mkdtemp(prefix="parallel-dit-"))
        self.channels: list[Channel] = []
        self.names = start.devices
        self._entry = entry or rank_entry()
        self._processes: list[Any] = []
        self._killing = threading.Lock()
        self._store = self.directory / "store"
        context = torch.multiprocessing.get_context("spawn")
        try:
            self._store.touch()
            self._logs = self._new_logs(start)
            for index in range(len(start.devices)):
                self._start(index, start, context)
        except BaseException:  # the machine has no more processes, memory or room in its folder for temporary files
            self.kill()
            raise

    def _start(self, index: int, start: StartSettings, context: Any) -> None:
        ours, theirs = context.Pipe(duplex=True)
        self.channels.append(Channel(ours, lends=True))
        settings = start.of_rank(index, self._store, self._logs[index])
        process = context.Process(
            target=self._entry, args=(settings, theirs), name=f"parallel-dit rank {index}", daemon=True
        )
        with clean_main_module():
            process.start()
        theirs.close()
        self._processes.append(process)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    @property
    def ends(self) -> Mapping[Any, int]:
        return {process.sentinel: rank for rank, process in enumerate(self._processes)}

    def how_ended(self, rank: int) -> str | None:
        code = self._processes[rank].exitcode
        if code is None:
            return None
        if code < 0:
            return f"was killed by signal {-code}"
        return f"ended with exit code {code}" + (f" ({code:#x})" if code > 255 else "")  # of Windows, known in hexadecimal

    def log_tail(self, rank: int) -> str:
        return tail(self._logs[rank])

    def dump(self, rank: int) -> None:
        if hasattr(signal, "SIGUSR1"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)

    def join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        with self._killing:
            for process in self._processes:
                if process.is_alive():
                    process.kill()
            self.join(KILL_SECONDS)
            shutil.rmtree(self.directory, ignore_errors=True)

    def _new_logs(self, start: StartSettings) -> list[Path]:
        if start.logs is not None:
            try:
                return new_logs(start.logs, len(start.devices))
            except OSError as error:
                log.warning("Parallel DiT: the ranks' logs cannot be kept in %s (%s)", start.logs, error)
        return new_logs(self.directory, len(start.devices))
