"""Ranks in threads of the test process: each runs the product's worker, with a mailbox in place of torch.distributed
(mailbox.py), or a transport with NCCL's rules (tests/support/strict/).

Neither a start nor a transfer takes time: what costs is the arithmetic. Messages travel over real pipes, and a rank that
fails reports it as a process does. What threads cannot show stays with processes: memory by rank, a rank that is killed,
Gloo itself, start-up and rendezvous.
"""

import contextlib
import functools
import gc
import importlib
import itertools
import os
import pkgutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed

import parallel_backend.rank
from parallel_backend.processes.local import KILL_SECONDS, Ranks
from parallel_backend.rank import loaded_stage, worker
from parallel_backend.rank.comm import peers
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.lifecycle import Stop
from parallel_backend.wire.rank_settings import RankSettings, StartSettings
from testing.emulated_device import EmulatedDevice, worker_on
from testing.mailbox import Distributed, Group


@dataclass(frozen=True)
class Meeting:
    """Replaces Rendezvous for ranks in one process, which need no store."""

    distributed: Distributed
    told: dict[Any, Sequence[int]] = field(default_factory=dict)
    """Numbers of all ranks of all pools."""
    pool: Any = None
    """What only this pool's ranks have."""
    group: Group | None = None
    """Of a part of the ranks; None: all of them."""
    turns: Iterator[int] = field(default_factory=itertools.count)

    def part(self, ranks: tuple[int, ...]) -> "Meeting":
        return replace(self, group=Group(-sum(1 << rank for rank in ranks), ranks), turns=itertools.count())

    def tell_all(self, rank: int, numbers: Sequence[int]) -> list[list[int]]:
        at, world = (self.pool, self.group, next(self.turns)), len(self.distributed.ranks_of(self.group))
        self.told[*at, rank] = numbers
        self.meet()
        return [list(self.told[*at, other]) for other in range(world)]

    def check(self) -> None:
        """Does nothing: a thread's peers cannot end alone."""

    def meet(self) -> None:
        self.distributed.meet(self.group)


@dataclass
class ThreadRanks:
    """What a Pool starts, see processes.local.Ranks. `distributed` stands in the ranks' modules. `device`: each rank's, if
    that is emulated."""

    distributed: Distributed
    start: StartSettings
    device: EmulatedDevice | None = None
    channels: list[Channel] = field(default_factory=list)
    workers: dict[int, worker.Worker] = field(default_factory=dict)
    """By rank, from its start to its end."""

    def __post_init__(self):
        self.names, self.logs = self.start.devices, None
        self._world = self.distributed.world(len(self.names))
        self._threads, self._theirs, self._cut = [], [], set()
        gc.collect()  # models of pools that have ended
        if not gc.get_freeze_count():  # only once: what is frozen, such as a model of another pool, is never freed
            gc.freeze()  # all that was imported is no concern of later collections
        for rank in range(len(self.names)):
            ours, theirs = Pipe(duplex=True)
            self.channels.append(Channel(ours, lends=True))
            self._theirs.append(theirs)
            thread = RankThread(target=self._run, args=(rank, theirs), name=f"rank {rank}", daemon=True)
            thread.collects = self.device is not None
            self._threads.append(thread)
            thread.start()

    def _run(self, rank: int, connection: Connection) -> None:
        self.distributed.enter(self._world, rank)
        settings = replace(self.start, threads=1).of_rank(rank, (str(id(self)), 0))
        try:
            worker.run(settings, connection, self._make_worker)
        except SystemExit:
            pass
        except OSError:
            if rank not in self._cut:
                raise
        finally:
            self.workers.pop(rank, None)

    def _make_worker(self, settings: RankSettings, *parts: Any) -> worker.Worker:
        make = worker.Worker if self.device is None else functools.partial(worker_on, self.device)
        self.workers[settings.rank] = made = make(settings, *parts)
        return made

    def die(self, rank: int) -> NoReturn:
        """End the calling thread, which is that rank, without a report, as a signal ends a process."""
        self._cut.add(rank)
        with socket.socket(fileno=os.dup(self._theirs[rank].fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)
        raise SystemExit

    @property
    def pids(self) -> tuple[int, ...]:
        return ()

    @property
    def ends(self) -> Mapping[Any, int]:
        return {}

    def how_ended(self, rank: int) -> str | None:
        return None if self._threads[rank].is_alive() else "ended"

    def log_tail(self, rank: int) -> str:
        return ""

    def dump(self, rank: int) -> None:
        """Does nothing: a thread has no log."""

    def join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """A thread cannot be ended by force: it ends at its next wait or message."""
        self._world.end()
        for channel, thread in zip(self.channels, self._threads, strict=True):
            with contextlib.suppress(OSError):
                if thread.is_alive():
                    channel.send(Stop())
        self.join(KILL_SECONDS)


class RankThread(threading.Thread):
    """`collects`: what is left of a model has to be gone before the next one, since its bytes are counted."""

    collects = False


def _collect() -> None:
    """In the place of gc.collect, at each loading. In a process with all tests' objects it would take longer than loading a
    tiny model, and what is left of one may wait for Python's garbage collections."""
    if getattr(threading.current_thread(), "collects", False):
        gc.collect()


def _end_thread(code: int) -> None:
    """Replaces os._exit."""
    raise SystemExit(code)


def _one_at_a_time(lock: threading.Lock, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def locked(*arguments: Any, **named: Any) -> Any:
        with lock:
            return function(*arguments, **named)

    return locked


@contextlib.contextmanager
def thread_ranks(distributed: Distributed | None = None) -> Iterator[Callable[..., Ranks]]:
    """Context that gives the `start` argument of a Pool, see ThreadRanks. In it the modules of parallel_backend.rank serve
    rank threads.

    `distributed`: what stands in for torch.distributed; None for the mailbox. May be nested: the innermost ends first.
    """
    distributed, building = distributed or Distributed(), threading.Lock()
    told: dict[Any, Sequence[int]] = {}
    with contextlib.ExitStack() as stack:
        for module_info in pkgutil.walk_packages(parallel_backend.rank.__path__, "parallel_backend.rank."):
            module = importlib.import_module(module_info.name)
            if (outer := getattr(module, "dist", None)) is torch.distributed or isinstance(outer, Distributed):
                distributed.outer = outer
                stack.enter_context(mock.patch.object(module, "dist", distributed))
        nothing: dict[str, Callable[..., Any]] = {
            "Rendezvous": lambda pool, *_: Meeting(distributed, told, pool),
            "keep_freed": lambda: None,
            "give_back": lambda: None,
            "device_memory": lambda _device: (0, 0),  # it opens files each second, and tests count this process's
        }
        # While a model is built nn.Module registers all parameters on the meta device, those of other threads too.
        for module, name in ((loaded_stage, "build_own_stage"), (worker, "probe")):
            stack.enter_context(mock.patch.object(module, name, _one_at_a_time(building, getattr(module, name))))
        stack.enter_context(mock.patch.object(peers, "join", lambda *_: None))
        read, readers = worker.Worker._read, []

        def read_until_the_end(rank: worker.Worker) -> None:
            if threading.current_thread() is not threading.main_thread():  # a test that calls it by itself
                readers.append(threading.current_thread())
            try:
                read(rank)
            except SystemExit:
                pass
            except TypeError:  # the rank's own thread has closed the connection while this one waits for a message
                if not rank.channel.connection.closed:
                    raise

        stack.enter_context(mock.patch.object(worker.Worker, "_read", read_until_the_end))
        libraries = {"os": SimpleNamespace(_exit=_end_thread), "gc": SimpleNamespace(collect=_collect)}
        stack.enter_context(mock.patch.multiple(worker, **libraries, **nothing))
        yield functools.partial(ThreadRanks, distributed)
        for reader in readers:  # the end of its connection has it call os._exit, which must not be the real one by then
            reader.join(KILL_SECONDS)
            assert not reader.is_alive(), "a pool of rank threads was not closed"
