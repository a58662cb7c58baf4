"""Starts and ends rank processes on this machine. Has the protocol `Ranks`, by which a pool uses ranks on any machine."""

import contextlib
import errno
import importlib
import logging
import multiprocessing.process
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
from parallel_backend.wire.rank_settings import RankSettings, StartSettings

from .failure_text import MORE_FILES
from .rank_log import new_log_folder, tail

log = logging.getLogger(__name__)

RankEntry = Callable[[RankSettings, Connection], None]

RANK_ENTRY = "parallel_backend.rank.start.entry"
"""Module whose `main` runs a rank. It is imported by name, because this package may not import the ranks' package."""
FOLDER_PREFIX = "parallel-dit-"
"""Prefix of the names of the ranks' temporary folders."""
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
"""Error numbers for the limit of open files of this process, or of the machine."""
KILL_SECONDS = 5.0
"""Seconds to wait until killed processes have ended. A process that is stuck in a driver does not end."""

_MAIN_MODULE = threading.Lock()


class Ranks(Protocol):
    """The processes of the ranks of one pool."""

    channels: list[Channel]
    """The control connection to each rank, in rank order."""
    names: tuple[str, ...]
    """The name of each rank's device, for errors."""

    @property
    def logs(self) -> Path | None:
        """The folder in which these ranks' logs stay after the ranks end. None: the logs are deleted."""

    @property
    def pids(self) -> tuple[int, ...]: ...

    @property
    def ends(self) -> Mapping[Any, int]:
        """Map each object for multiprocessing.connection.wait to a rank. The object is ready once the rank has ended. If it
        is empty, a rank counts as ended when its channel ends, which `how_ended` confirms within half a second."""

    def how_ended(self, rank: int) -> str | None:
        """Return how the process ended, such as 'was killed by signal 9', or None if it still runs."""

    def log_tail(self, rank: int) -> str:
        """Return the last lines of the rank's log, or an empty string if it has no log."""

    def dump(self, rank: int) -> None:
        """Make the rank write its Python stacks to its log, even if it hangs. Does nothing on systems without the signal for
        it."""

    def join(self, seconds: float) -> None:
        """Wait until all processes have ended, but at most `seconds`."""

    def kill(self) -> None:
        """Kill all processes and remove their files on this machine. May be called from any thread, and repeatedly. A thread
        that is blocked in a channel then returns with an error. The pool closes the channels."""


@contextlib.contextmanager
def clean_main_module() -> Iterator[None]:
    """Context in which `__main__` is empty, because a spawned child imports its parent's `__main__`, here ComfyUI's
    main.py."""
    with _MAIN_MODULE:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def only_ended_by_us(process: Any) -> None:
    """Hide the child process from multiprocessing, so that the child ends only when it sees that this process has ended.
    multiprocessing's exit function would terminate it even in a fork of this process, made by another node pack for
    example."""
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


def rank_entry() -> RankEntry:
    """Return the main function of a rank's process. It takes the rank's settings and its end of the control connection."""
    return importlib.import_module(RANK_ENTRY).main


class LocalRanks:
    """Ranks as child processes of this one. `entry` replaces `rank_entry()` as their main function.

    `directory` is a temporary folder that only this user can read. The logs are in it, unless the settings name a folder. A
    rank removes it if this process is killed (rank/start/parent_watch.py).
    """

    def __init__(self, start: StartSettings, entry: RankEntry | None = None):
        """Start the processes. Raises RuntimeError if torch has no torch.distributed, or if the limit of open files is
        reached; OSError for other limits."""
        if not torch.distributed.is_available():
            raise RuntimeError(
                f"Parallel DiT: torch {torch.__version__} was built without torch.distributed, which ranks need. AMD's "
                "wheels for Windows had none before June 2026: install a newer torch, or run ComfyUI in WSL2."
            )
        if torch.version.hip and "cuda" in map(device_kind, start.devices):
            log.warning("Parallel DiT: ranks on AMD GPUs (ROCm) are untested. Please report the result in an issue")
        self.directory = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self.channels: list[Channel] = []
        self.names = start.devices
        self._entry = entry or rank_entry()
        self._processes: list[Any] = []
        self._killing = threading.Lock()
        self._store = self.directory / "store"
        self.logs: Path | None = None
        context = torch.multiprocessing.get_context("spawn")
        try:
            self._store.touch()
            self._logs = self._new_logs(start)
            for index in range(len(start.devices)):
                self._start(index, start, context)
        except BaseException as error:  # such as MemoryError
            self._give_up()
            if isinstance(error, OSError) and error.errno in OUT_OF_FILES:
                raise RuntimeError(
                    f"Parallel DiT: {len(start.devices)} ranks cannot be started, because ComfyUI may not open more "
                    f"files ({error.strerror}). {MORE_FILES}"
                ) from error
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
        only_ended_by_us(process)
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
        return f"ended with exit code {code}" + (f" ({code:#x})" if code > 255 else "")  # as Windows' are known

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

    def _give_up(self) -> None:
        """End the processes that have been started. Channels are closed first, because removing files needs free file
        handles."""
        for channel in self.channels:
            channel.connection.close()
        self.kill()

    def _new_logs(self, start: StartSettings) -> list[Path]:
        folder = self.directory
        if start.logs is not None:
            try:
                self.logs = folder = new_log_folder(start.logs)
            except OSError as error:
                log.warning("Parallel DiT: the ranks' logs cannot be stored in %s (%s)", start.logs, error)
        return [folder / f"rank-{rank}.log" for rank in range(len(start.devices))]
