"""The ranks of one set of devices: started once, watched, kept between prompts, ended together when one fails."""

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.multiprocessing

from . import messages as m
from .channel import Channel
from .rank import RankSettings, main

log = logging.getLogger(__name__)

Poll = Callable[[], None]
"""Called every few ms while the client waits; raises to give up (ComfyUI's Cancel does)."""

Progress = Callable[[str, float], None]
"""Called now and then while a model is brought onto the ranks: what they are doing, and the share of it that is done."""

POLL_SECONDS = 0.02
BLAME_SECONDS = 1.0
"""How long to look for the root cause after a rank reports that a transfer failed: the rank that died explains more."""
STOP_SECONDS = 3.0
_MAIN_MODULE = threading.Lock()

_Key = tuple[type, int | None]
"""What a request waits for: the replies' type and, where they have one, their run."""


class RankError(RuntimeError):
    """A rank failed. The message names it, its device and what it was doing; the pool is gone, the next use rebuilds it."""


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


def wait_for(future: Future, poll: Poll) -> Any:
    """The future's result; `poll` runs while it is not there yet."""
    while True:
        try:
            return future.result(timeout=POLL_SECONDS)
        except FutureTimeout:
            if future.done():  # it came between the time-out and here, or is a time-out error itself
                return future.result()
            poll()


class Pool:
    """One process per device, and one model at a time on them (see `take_over`).

    `threads`: CPU threads per rank; None shares the machine's cores out evenly. `slowdown`: per rank, see
    rank.RankSettings; None is full speed for all.
    """

    def __init__(
        self,
        devices: tuple[str, ...],
        threads: int | None = None,
        timeout: timedelta = timedelta(minutes=30),
        slowdown: tuple[float, ...] | None = None,
    ):
        self.devices, self.timeout = devices, timeout
        self.slowdown = slowdown or (1.0,) * len(devices)
        self.threads = threads or max(1, (os.cpu_count() or 1) // len(devices))
        self.error: Exception | None = None
        self._on_output: Callable[[m.Output], None] = lambda output: None
        self._on_loading: Callable[[m.Loading], None] = lambda loading: None
        self._on_failure: Callable[[Exception], None] = lambda error: None
        self._gathers: dict[_Key, tuple[Future, dict[int, Any]]] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._failed_at: float | None = None
        self._failures: list[m.Failure] = []
        self._directory = Path(tempfile.mkdtemp(prefix="parallel-dit-"))
        self._processes: list[Any] = []
        self._channels: list[Channel] = []
        ready = self._expect((m.Ready, None))
        self._start()
        self._watcher = threading.Thread(target=self._watch, name="parallel-dit-pool", daemon=True)
        self._watcher.start()
        self.ready: Future = ready

    def _start(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        for index in range(len(self.devices)):
            ours, theirs = context.Pipe(duplex=True)
            store, slowdown = self._directory / "store", self.slowdown[index]
            settings = RankSettings(index, self.devices, store, self.threads, self.timeout, slowdown)
            process = context.Process(target=main, args=(settings, theirs), name=f"parallel-dit rank {index}", daemon=True)
            with clean_main_module():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._channels.append(Channel(ours))

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def take_over(
        self,
        on_output: Callable[[m.Output], None],
        on_loading: Callable[[m.Loading], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """From now on these get every Output and Loading, and the pool's failure, on its own thread.

        Their predecessor is let go.
        """
        self._on_failure(RuntimeError("Parallel DiT: another model has been loaded on these ranks"))
        self._on_output, self._on_loading, self._on_failure = on_output, on_loading, on_failure

    def send(self, rank: int, message: Any) -> None:
        """Raises RankError if the pool has failed; a rank that is just gone is reported by the watcher."""
        if self.error is not None:
            raise self.error
        with contextlib.suppress(OSError):
            self._channels[rank].send(message)

    def ask(self, message: Any, reply: type) -> Future:
        """Send to every rank; the future gives their replies of type `reply`, in rank order."""
        future = self._expect((reply, getattr(message, "run", None)))
        self.tell(message)
        return future

    def tell(self, message: Any) -> None:
        """Send to every rank; whatever they reply is dropped."""
        for rank in range(len(self.devices)):
            self.send(rank, message)

    def close(self, politely: bool = True) -> None:
        """End all ranks: politely, then by force. Idempotent.

        Not `politely`: by force at once. A rank that starts or loads would not hear the request until it is done.
        """
        if self._closing:
            return
        self._closing = True
        if politely:
            for channel in self._channels:
                with contextlib.suppress(OSError):
                    channel.send(m.Stop())
            deadline = time.monotonic() + STOP_SECONDS
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
        self._watcher.join(STOP_SECONDS)  # before its connections are closed under it
        self._kill()

    def _expect(self, key: _Key) -> Future:
        with self._lock:
            assert key not in self._gathers, f"two requests wait for {key}"
            future: Future = Future()
            if self.error is not None:
                future.set_exception(self.error)
            else:
                self._gathers[key] = (future, {})
            return future

    def _watch(self) -> None:
        """The pool's thread. Whatever goes wrong in it ends the pool with that error: nobody else would notice."""
        try:
            self._hand_on()
        except Exception as error:
            self._fail(error)
            raise

    def _hand_on(self) -> None:
        """Hand messages on, notice deaths, name the culprit."""
        sources = {channel.connection: rank for rank, channel in enumerate(self._channels)}
        sentinels = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        while not self._closing:
            for source in wait([*sources, *sentinels], timeout=0.1):
                if source in sources:
                    try:
                        self._receive(self._channels[sources[source]].receive())
                    except (EOFError, OSError):
                        del sources[source]
                else:
                    del sentinels[source]
                    self._failed_at = self._failed_at or time.monotonic()
            if self._failed_at is not None and not self._closing and self._blame():
                return

    def _receive(self, message: Any) -> None:
        if isinstance(message, m.Output):
            self._on_output(message)
        elif isinstance(message, m.Loading):
            self._on_loading(message)
        elif isinstance(message, m.Failure):
            self._failures.append(message)
            self._failed_at = self._failed_at or time.monotonic()
        else:
            key = (type(message), getattr(message, "run", None))
            with self._lock:
                if key not in self._gathers:
                    return
                future, replies = self._gathers[key]
                replies[message.rank] = message
                complete = len(replies) == len(self.devices)
                if complete:
                    del self._gathers[key]
            if complete:
                future.set_result([replies[rank] for rank in sorted(replies)])

    def _blame(self) -> bool:
        """Once the root cause is known, or waiting for it is over: end the pool with an error that names it."""
        reported = {failure.rank for failure in self._failures}
        died = [rank for rank, p in enumerate(self._processes) if p.exitcode is not None and rank not in reported]
        own = [failure for failure in self._failures if not failure.peer]
        late = time.monotonic() - self._failed_at > BLAME_SECONDS
        if own:
            failure = own[0]
            text = f"{self._name(failure.rank)} failed in {failure.doing}: {failure.summary}\n{failure.traceback}"
        elif died:
            code = self._processes[died[0]].exitcode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            text = f"{self._name(died[0])} {how}. If the system ran out of memory, use more ranks or a smaller dtype."
        elif late:
            failure = self._failures[0]
            text = f"{self._name(failure.rank)} lost its peer: {failure.summary}\n{failure.traceback}"
        else:
            return False
        self._fail(RankError(f"Parallel DiT: {text}"))
        return True

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.devices[rank]})"

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.error = error
            gathers, self._gathers = self._gathers, {}
        self._closing = True
        self._kill()
        for future, _ in gathers.values():
            future.set_exception(error)
        self._on_failure(error)

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        for channel in self._channels:
            channel.close()
        shutil.rmtree(self._directory, ignore_errors=True)
