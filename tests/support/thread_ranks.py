"""Ranks in threads of the test process: each runs the product's own worker, with a mailbox in place of torch.distributed.

Neither a start nor a transfer takes time: what costs is the arithmetic. Messages travel over real pipes, and a rank that
fails reports it as a process does. What threads cannot show stays with processes: memory by rank, a rank that is killed,
Gloo itself, start-up and rendezvous.

Sends are buffered: a copy is in the mailbox when the call returns, and lands in the receiver's tensor at its wait. A wait
that nobody answers ends after LIMIT seconds with an error that says who waits for what.
"""

import contextlib
import functools
import gc
import importlib
import os
import pkgutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed

import parallel_backend.rank
from parallel_backend.processes.local import KILL_SECONDS, Ranks, StartSettings
from parallel_backend.rank import loaded_stage, worker
from parallel_backend.rank.comm import peers
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.lifecycle import Stop
from parallel_backend.wire.rank_settings import RankSettings

LIMIT = 60.0
"""Seconds of waiting for another rank after which it counts as a deadlock."""


@dataclass(frozen=True)
class Group:
    """A process group. `number`: how many the world had made before, the same on all of its ranks."""

    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """Messages of a kind between two ranks: each is received in the order in which it was sent."""

    kind: str
    group: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.kind} of group {self.group} from rank {self.source}"


@dataclass(frozen=True)
class Letter:
    """The `number`th message of a route."""

    route: Route
    number: int


class World:
    """The mailbox of one set of ranks."""

    def __init__(self, size: int, limit: float = LIMIT):
        self.group = Group(0, tuple(range(size)))
        self._limit = limit
        self._changed = threading.Condition()
        self._letters: dict[Letter, torch.Tensor] = {}
        self._sent: Counter[Route] = Counter()
        self._expected: Counter[Route] = Counter()
        self._waiting: dict[int, Letter] = {}
        self._ended = False

    def post(self, route: Route, tensor: torch.Tensor) -> None:
        with self._changed:
            self._letters[Letter(route, self._sent[route])] = tensor.detach().clone()
            self._sent[route] += 1
            self._changed.notify_all()

    def expect(self, route: Route) -> Letter:
        """What the route's next `take` gets."""
        with self._changed:
            self._expected[route] += 1
            return Letter(route, self._expected[route] - 1)

    def take(self, letter: Letter) -> torch.Tensor:
        """Blocks until it is there. RuntimeError, as torch.distributed's, if it does not come."""
        rank, deadline = letter.route.target, time.monotonic() + self._limit
        with self._changed:
            self._waiting[rank] = letter
            try:
                while letter not in self._letters:
                    if self._ended:
                        raise RuntimeError("the ranks were ended")
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        waits = [f"rank {waiting} for {self._waiting[waiting].route}" for waiting in sorted(self._waiting)]
                        raise RuntimeError(f"deadlock, nothing came for {self._limit:g} s: {', '.join(waits)}")
                return self._letters.pop(letter)
            finally:
                del self._waiting[rank]

    def end(self) -> None:
        """Whoever waits is let go with an error."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@dataclass(frozen=True)
class Receipt:
    """What `Member.receive` gives, to be waited for: the tensor, and what will be in it."""

    world: World
    letter: Letter
    into: torch.Tensor

    def wait(self) -> None:
        came, into = self.world.take(self.letter), self.into
        sizes = f"{tuple(came.shape)} {came.dtype} came where {tuple(into.shape)} {into.dtype} belong"
        assert (came.shape, came.dtype) == (into.shape, into.dtype), f"{self.letter.route}: {sizes}"
        with torch.inference_mode():  # a rank may wait outside of the step that made the tensor
            into.copy_(came)


@dataclass
class Work:
    """An operation under way, as torch.distributed's: `finish` runs once all receipts have come."""

    receipts: Sequence[Receipt] = ()
    finish: Callable[[], None] = lambda: None

    def wait(self) -> bool:
        for receipt in self.receipts:
            receipt.wait()
        self.finish()
        return True


@dataclass
class Member:
    """A rank's place in its world."""

    world: World
    rank: int
    groups: int = 1  # made so far, the whole world's included

    def send(self, kind: str, tensor: torch.Tensor, to: int, group: Group | None) -> Work:
        self.world.post(Route(kind, (group or self.world.group).number, self.rank, to), tensor)
        return Work()

    def receive(self, kind: str, into: torch.Tensor, source: int, group: Group | None) -> Receipt:
        route = Route(kind, (group or self.world.group).number, source, self.rank)
        return Receipt(self.world, self.world.expect(route), into)


@dataclass(frozen=True)
class P2POp:
    """As torch.distributed's: `op` is its isend or irecv."""

    op: Callable[..., Work]
    tensor: torch.Tensor
    peer: int
    group: Group | None = None


class Distributed:
    """What the modules of a rank use of torch.distributed, for rank threads; other threads get what it stands in for.

    Arguments are named and ordered as there.
    """

    def __init__(self):
        self._here = threading.local()
        self.outer: Any = torch.distributed
        """What other threads get: ranks of an outer `thread_ranks` their own stand-in."""

    def world(self, size: int) -> World:
        """A new set of ranks."""
        return World(size)

    def enter(self, world: World, rank: int) -> None:
        """The calling thread is this rank of the world from now on."""
        self._here.member = Member(world, rank)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outer, name)

    def __getattribute__(self, name: str) -> Any:
        """A method of this class is for rank threads only."""
        if name in REPLACED and not hasattr(object.__getattribute__(self, "_here"), "member"):
            return getattr(object.__getattribute__(self, "outer"), name)
        return object.__getattribute__(self, name)

    def isend(self, tensor: torch.Tensor, dst: int, group: Group | None = None) -> Work:
        return self._here.member.send("point to point", tensor, dst, group)

    def irecv(self, tensor: torch.Tensor, src: int, group: Group | None = None) -> Work:
        return Work([self._here.member.receive("point to point", tensor, src, group)])

    def send(self, tensor: torch.Tensor, dst: int, group: Group | None = None) -> None:
        self.isend(tensor, dst, group)

    def recv(self, tensor: torch.Tensor, src: int, group: Group | None = None) -> None:
        self.irecv(tensor, src, group).wait()

    def P2POp(self, op: Callable[..., Work], tensor: torch.Tensor, peer: int, group: Group | None = None) -> P2POp:
        return P2POp(op, tensor, peer, group)

    def batch_isend_irecv(self, p2p_op_list: list[P2POp]) -> list[Work]:
        return [operation.op(operation.tensor, operation.peer, operation.group) for operation in p2p_op_list]

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        group: Group | None = None,
        async_op: bool = False,
    ) -> Work | None:
        member, ranks = self._here.member, self._ranks(group)
        into, given = output.split(list(output_split_sizes)), input.split(list(input_split_sizes))
        for rank, part in zip(ranks, given, strict=True):
            member.send("all-to-all", part, rank, group)
        work = Work([member.receive("all-to-all", part, rank, group) for rank, part in zip(ranks, into, strict=True)])
        return self._started(work, async_op)

    def all_reduce(self, tensor: torch.Tensor, group: Group | None = None, async_op: bool = False) -> Work | None:
        """The sum, in the order of the ranks on each of them: the same bits everywhere."""
        member, ranks = self._here.member, self._ranks(group)
        parts = [torch.empty_like(tensor) for _ in ranks]
        for rank in ranks:
            member.send("all-reduce", tensor, rank, group)
        receipts = [member.receive("all-reduce", part, rank, group) for rank, part in zip(ranks, parts, strict=True)]
        return self._started(Work(receipts, lambda: tensor.copy_(functools.reduce(torch.add, parts))), async_op)

    def barrier(self, group: Group | None = None, device_ids: list[int] | None = None) -> None:
        member = self._here.member
        others = [rank for rank in self._ranks(group) if rank != member.rank]
        for rank in others:
            member.send("barrier", torch.empty(0), rank, group)
        Work([member.receive("barrier", torch.empty(0), rank, group) for rank in others]).wait()

    def meet(self) -> None:
        """Wait until every rank has come here, as by a Rendezvous."""
        self.barrier()

    def new_group(self, ranks: list[int], timeout: timedelta | None = None, group_desc: str | None = None) -> Group | object:
        """Every rank calls it for every group; one that is not in it gets torch's sign for that."""
        member = self._here.member
        group = Group(member.groups, tuple(ranks))
        member.groups += 1
        return group if member.rank in ranks else torch.distributed.GroupMember.NON_GROUP_MEMBER

    def destroy_process_group(self, group: Group | None = None) -> None:
        """A group has nothing to end."""

    def is_initialized(self) -> bool:
        return True

    def get_backend(self, group: Group | None = None) -> str:
        return "gloo"

    def _ranks(self, group: Group | None) -> tuple[int, ...]:
        return (group or self._here.member.world.group).ranks

    @staticmethod
    def _started(work: Work, async_op: bool) -> Work | None:
        if async_op:
            return work
        work.wait()
        return None


REPLACED = frozenset(name for name in vars(Distributed) if not name.startswith("_")) - {"world", "enter"}


@dataclass(frozen=True)
class Meeting:
    """In the place of a Rendezvous: there is no store."""

    distributed: Distributed

    def check(self) -> None:
        """Nothing can be gone."""

    def meet(self) -> None:
        self.distributed.meet()


@dataclass
class ThreadRanks:
    """What a Pool starts, see processes.local.Ranks. `distributed` stands in the ranks' modules."""

    distributed: Distributed
    start: StartSettings
    channels: list[Channel] = field(default_factory=list)

    def __post_init__(self):
        self.names = self.start.devices
        self._world = self.distributed.world(len(self.names))
        self._threads, self._theirs, self._cut = [], [], set()
        # Every loading ends with a collection, which a rank's process spares what it has imported.
        gc.collect()
        gc.freeze()
        for rank in range(len(self.names)):
            ours, theirs = Pipe(duplex=True)
            self.channels.append(Channel(ours, lends=True))
            self._theirs.append(theirs)
            thread = threading.Thread(target=self._run, args=(rank, theirs), name=f"rank {rank}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, rank: int, connection: Connection) -> None:
        self.distributed.enter(self._world, rank)
        start = self.start
        settings = RankSettings(
            rank=rank,
            devices=start.devices,
            rendezvous=("", 0),
            threads=1,
            timeout=start.timeout,
            slowdown=start.slowdown[rank],
            heartbeat_seconds=start.heartbeat_seconds,
            self_test=start.self_test,
        )
        try:
            worker.run(settings, connection)
        except SystemExit:
            pass
        except OSError:
            if rank not in self._cut:
                raise

    def die(self, rank: int) -> NoReturn:
        """End the calling thread, which is that rank, as a signal ends a process: without a word."""
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
        """A thread has no log."""

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


def _end_thread(code: int) -> None:
    """In the place of os._exit."""
    raise SystemExit(code)


def _one_at_a_time(lock: threading.Lock, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def locked(*arguments: Any, **named: Any) -> Any:
        with lock:
            return function(*arguments, **named)

    return locked


@contextlib.contextmanager
def thread_ranks(distributed: Distributed | None = None) -> Iterator[Callable[[StartSettings], Ranks]]:
    """What a Pool takes as `start`. Within it the modules of parallel_backend.rank serve rank threads.

    `distributed`: what stands in for torch.distributed; None for the mailbox. May be nested: the innermost ends first.
    """
    distributed, building = distributed or Distributed(), threading.Lock()
    with contextlib.ExitStack() as stack:
        for found in pkgutil.walk_packages(parallel_backend.rank.__path__, "parallel_backend.rank."):
            module = importlib.import_module(found.name)
            if (outer := getattr(module, "dist", None)) is torch.distributed or isinstance(outer, Distributed):
                distributed.outer = outer
                stack.enter_context(mock.patch.object(module, "dist", distributed))
        nothing: dict[str, Callable[..., Any]] = {
            "Rendezvous": lambda *_: Meeting(distributed),
            "keep_freed": lambda: None,
            "give_back": lambda: None,
        }
        # While a model is built nn.Module registers all parameters on the meta device, those of other threads too.
        for module, name in ((loaded_stage, "build_stage"), (worker, "probe")):
            stack.enter_context(mock.patch.object(module, name, _one_at_a_time(building, getattr(module, name))))
        stack.enter_context(mock.patch.object(peers, "join", lambda *_: None))
        read, readers = worker.Worker._read, []

        def read_until_the_end(rank: worker.Worker) -> None:
            readers.append(threading.current_thread())
            try:
                read(rank)
            except SystemExit:
                pass
            except TypeError:  # the rank's own thread has closed the connection while this one waits for a message
                if not rank.channel.connection.closed:
                    raise

        stack.enter_context(mock.patch.object(worker.Worker, "_read", read_until_the_end))
        stack.enter_context(mock.patch.multiple(worker, os=SimpleNamespace(_exit=_end_thread), **nothing))
        yield functools.partial(ThreadRanks, distributed)
        for reader in readers:  # the end of its connection has it call os._exit, which must not be the real one by then
            reader.join(KILL_SECONDS)
            assert not reader.is_alive(), "a pool of rank threads was not closed"
