"""A mailbox in place of torch.distributed, for ranks in threads of one process.

Sends are buffered: a copy is in the mailbox when the call returns, and lands in the receiver's tensor at its wait. A wait
that nobody answers ends after LIMIT seconds with an error that says who waits for what.
"""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

LIMIT = 60.0
"""Seconds of waiting for another rank after which it counts as a deadlock."""


@dataclass(frozen=True)
class Group:
    """A process group. `number`: how many the world had made before, the same on all of its ranks. `through`: what carries
    out the operations that torch's groups have as methods."""

    number: int
    ranks: tuple[int, ...]
    through: Any = field(default=None, compare=False, repr=False)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, came: list[int], left: list[int]) -> Any:
        return self.through.all_to_all_single(output, input, came, left, self, True)

    alltoall_base = all_to_all_single  # torch's name before 2.13

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        return self.through.all_reduce(*tensors, self, True)


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
        """The letter that the route's next `take` receives."""
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
        """All waits end with an error."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@dataclass(frozen=True)
class Receipt:
    """A pending receive: the tensor, and the letter whose content it gets."""

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
        """From now on the calling thread is this rank of the world."""
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
        self.isend(tensor, dst, group).wait()

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
        member, ranks = self._here.member, self.ranks_of(group)
        into, pieces = output.split(list(output_split_sizes)), input.split(list(input_split_sizes))
        for rank, part in zip(ranks, pieces, strict=True):
            member.send("all-to-all", part, rank, group)
        work = Work([member.receive("all-to-all", part, rank, group) for rank, part in zip(ranks, into, strict=True)])
        return self._started(work, async_op)

    def all_reduce(self, tensor: torch.Tensor, group: Group | None = None, async_op: bool = False) -> Work | None:
        """The sum, in the order of the ranks on each of them: the same bits everywhere."""
        member, ranks = self._here.member, self.ranks_of(group)
        parts = [torch.empty_like(tensor) for _ in ranks]
        for rank in ranks:
            member.send("all-reduce", tensor, rank, group)
        receipts = [member.receive("all-reduce", part, rank, group) for rank, part in zip(ranks, parts, strict=True)]
        return self._started(Work(receipts, lambda: tensor.copy_(functools.reduce(torch.add, parts))), async_op)

    def barrier(self, group: Group | None = None, device_ids: list[int] | None = None) -> None:
        member = self._here.member
        others = [rank for rank in self.ranks_of(group) if rank != member.rank]
        for rank in others:
            member.send("barrier", torch.empty(0), rank, group)
        Work([member.receive("barrier", torch.empty(0), rank, group) for rank in others]).wait()

    def meet(self, group: Group | None = None) -> None:
        """Wait until every rank of the group, or of the world, has come here, as by a Rendezvous."""
        self.barrier(group)

    def new_group(self, ranks: list[int], timeout: timedelta | None = None, group_desc: str | None = None) -> Group | object:
        """Every rank calls it for every group; one that is not in it gets torch's sign for that."""
        member = self._here.member
        group = Group(member.groups, tuple(ranks), self)
        member.groups += 1
        return group if member.rank in ranks else torch.distributed.GroupMember.NON_GROUP_MEMBER

    def destroy_process_group(self, group: Group | None = None) -> None:
        """A group has nothing to end."""

    def is_initialized(self) -> bool:
        return True

    def get_backend(self, group: Group | None = None) -> str:
        return "gloo"

    def ranks_of(self, group: Group | None) -> tuple[int, ...]:
        return (group or self._here.member.world.group).ranks

    @staticmethod
    def _started(work: Work, async_op: bool) -> Work | None:
        if async_op:
            return work
        work.wait()
        return None


REPLACED = frozenset(name for name in vars(Distributed) if not name.startswith("_")) - {"world", "enter"}
