"""When operations run, and what they are held to: queues of communicators, places of a rank, and pairs of ranks in order."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from torch.distributed import DistStoreError

from .operation import Communicator, Connection, Operation
from .rules import ANY, TRIAL, Deadlock, RuleBroken, Rules, as_bytes, is_poisoned, poison


class Fabric:
    """What connects one set of ranks. Whoever waits moves all ranks' operations on: there is no thread of its own."""

    def __init__(self, size: int, rules: Rules):
        self.rules = rules
        self.ranks = tuple(range(size))
        self.broken: Exception | None = None
        """The first rule that was broken. From then on every call and wait of every rank raises it."""
        self.most_under_way = 0
        """Communicators of one rank that had an operation under way at once, at most."""
        self.before_issue: Callable[[int, int], None] = lambda rank, number: None
        """Called with the rank and the number of its operation, on the rank's thread."""
        self._changed = threading.Condition()
        self._queues: list[dict[Communicator, deque[Operation]]] = [{} for _ in self.ranks]
        self._running = [0 for _ in self.ranks]
        self._numbers = [0 for _ in self.ranks]
        self._not_waited: list[set[Operation]] = [set() for _ in self.ranks]
        # By communicator and (rank, peer): its operations with the peer that the peer has not answered yet, and how many.
        self._unanswered: dict[tuple[Communicator, int, int], deque[Operation]] = defaultdict(deque)
        # By communicator and rank: what it has connected for. Only this communicator's connections: each has its own.
        self._connected: dict[tuple[Communicator, int], set[Connection]] = defaultdict(set)
        self._came: dict[Communicator, dict[int, str]] = defaultdict(dict)
        self._met = [0 for _ in self.ranks]
        self._meetings: dict[int, tuple[str, str]] = {}
        self._hosts: dict[int, str] = {}
        self._moved_at = time.monotonic()
        self._ended = False

    def opened(self, rank: int) -> tuple[int, int]:
        """(communicators, other ranks in each of them, added up) that the rank has connected so far."""
        peers = {
            communicator: {connection.peer for connection in connected} - {None}
            for (communicator, of), connected in self._connected.items()
            if of == rank and connected
        }
        return len(peers), sum(map(len, peers.values()))

    # What ranks call.

    def issue(
        self, operation: Callable[[int, float], Operation], rank: int, communicator: Communicator, where: str
    ) -> Operation:
        """Queue `operation(number, ready)`. Blocks until all ranks of the communicator have used it for the first time."""
        rules = self.rules
        with self._changed:
            self._first_use(communicator, rank, where)
            number = self._numbers[rank]
            self.before_issue(rank, number)
            self._numbers[rank] += 1
            op = operation(number, time.monotonic() + rules.pause(rank, str(communicator), number))
            self._connect(op)
            for tensors in op.receives.values():
                for tensor in tensors:
                    poison(tensor)
            self._queues[rank].setdefault(communicator, deque()).append(op)
            self._not_waited[rank].add(op)
            self.most_under_way = max(self.most_under_way, sum(bool(queue) for queue in self._queues[rank].values()))
            for peer in op.peers:
                self._pair(op, peer)
            self._advance()
            self._stir()
        return op

    def wait(self, op: Operation, where: str) -> None:
        """Until it has run; then what came is where it belongs."""
        with self._changed:
            self._until(lambda: op.done, op.rank, f"{op}, waited for at {where}")
            self._check(op.check_unchanged)
            if op.in_place is not None:
                self._check(lambda: _check_untouched(op.in_place, op))
            for into, came in op.came:
                self._check(lambda into=into: _check_untouched(into, op))
                with torch.inference_mode():
                    as_bytes(into).copy_(came)
            op.came.clear()
            self._not_waited[op.rank].discard(op)

    def break_rule(self, error: RuleBroken) -> NoReturn:
        with self._changed:
            self._fail(error)

    def meet(self, rank: int, what: str, where: str) -> None:
        """Wait by the store until all ranks have come here. RuleBroken if it is something else that others meet for."""
        with self._changed:
            number = self._met[rank]
            self._met[rank] += 1
            first = self._meetings.setdefault(number, (what, where))
            if first[0] != what:
                self._fail(
                    RuleBroken(f"ranks meet for different things: rank {rank} for {what} at {where}, others for {first}")
                )
            self._stir()
            self._until(lambda: min(self._met) > number, rank, f"{what} at {where}", self._store_time())
            if late := [other for other in self.ranks if self._met[other] <= number]:
                self._time_over(f"rank {rank} came to {what} at {where}", late)

    def end_group(self, rank: int, group: int | None) -> None:
        """RuleBroken if an operation of the rank in it was never waited for. None: any group."""
        with self._changed:
            for op in self._not_waited[rank]:
                if group in (None, op.communicator.group):
                    self._fail(RuleBroken(f"never waited for: {op}"))

    def end(self) -> None:
        """Whoever waits is let go with an error."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # All below is under the lock.

    def _first_use(self, communicator: Communicator, rank: int, where: str) -> None:
        """Wait until all of its ranks have come to it, if this one has not yet. DistStoreError if they do not in time."""
        came = self._came[communicator]
        if rank in came:
            self._raise_if_over()
            return
        came[rank] = where
        self._stir()
        missing: Callable[[], list[int]] = lambda: [other for other in communicator.ranks if other not in came]  # noqa: E731
        self._until(lambda: not missing(), rank, f"the first use of {communicator} at {where}", self._store_time())
        if late := missing():
            self._time_over(f"rank {rank} came to {communicator} at {where}", late)

    def _store_time(self) -> float:
        return time.monotonic() + self.rules.store_seconds

    def _time_over(self, came: str, late: list[int]) -> NoReturn:
        who = ", ".join(f"rank {other}" for other in late)
        raise DistStoreError(f"the store's time is over: {came}, {who} did not. {self._state()}")

    def _connect(self, op: Operation) -> None:
        """RuleBroken where the operation needs a connection that no trial has opened."""
        connected = self._connected[op.communicator, op.rank]
        new = [connection for connection in op.connections if connection not in connected]
        if new and self.rules.trials and TRIAL not in op.place:
            self._fail(RuleBroken(f"the first {new[0]} comes outside of a trial: {op}"))
        connected.update(new)

    def _pair(self, op: Operation, peer: int) -> None:
        """Find what it answers at that peer, or leave it to be answered."""
        if peer == op.rank:
            op.partners[peer] = op
            return
        waiting = self._unanswered[op.communicator, peer, op.rank]
        if not waiting:
            self._unanswered[op.communicator, op.rank, peer].append(op)
            return
        other = waiting.popleft()
        self._check(lambda: op.check_against(other))
        op.partners[peer], other.partners[op.rank] = other, op

    def _until(self, condition: Callable[[], bool], rank: int, what: str, deadline: float | None = None) -> None:
        """Move operations on until the condition holds, or the deadline is over, if there is one."""
        self._hosts[rank] = what
        try:
            while True:
                self._raise_if_over()
                now = time.monotonic()  # before the look at what may start: what is ready a little later is not slept over
                self._advance()
                if condition() or (deadline is not None and now >= deadline):
                    return
                until = self._moved_at + self.rules.patience if deadline is None else deadline
                if now >= until:
                    self._fail(Deadlock(f"nothing has moved for {self.rules.patience:g} s. {self._state()}"))
                self._changed.wait(max(0.0, min([until, *self._starts(now)]) - now))
        finally:
            del self._hosts[rank]

    def _advance(self) -> None:
        """Start what may start, and move what has been started on both sides."""
        started = True
        while started:
            started = False
            for rank in self.ranks:
                if self._running[rank] < self.rules.places and (op := self._next(rank)) is not None:
                    self._launch(op)
                    started = True

    def _next(self, rank: int) -> Operation | None:
        heads = [op for op in self._heads(rank) if not op.launched]
        if self.rules.launch != ANY:
            heads = sorted(heads, key=lambda op: op.number)[:1]
        ready = [op for op in heads if op.ready <= time.monotonic()]
        return min(ready, key=lambda op: op.ready, default=None)

    def _heads(self, rank: int) -> Iterator[Operation]:
        return (queue[0] for queue in self._queues[rank].values() if queue)

    def _starts(self, now: float) -> list[float]:
        """When operations may start that might not at `now`."""
        return [op.ready for rank in self.ranks for op in self._heads(rank) if not op.launched and op.ready > now]

    def _launch(self, op: Operation) -> None:
        op.launched = True
        self._running[op.rank] += 1
        for peer in list(op.unmoved):
            partner = op.partners.get(peer)
            if partner is not None and partner.launched:
                self._move(op, partner)

    def _move(self, one: Operation, two: Operation) -> None:
        for source, target in ((one, two), (two, one))[: 1 if one is two else 2]:
            self._check(source.check_unchanged)
            into = target.receives.get(source.rank, ())
            for sent, belongs in zip(source.sends.get(target.rank, ()), into, strict=True):
                target.came.append((belongs, as_bytes(sent).clone()))
        one.unmoved.discard(two.rank)
        two.unmoved.discard(one.rank)
        for op in {one, two}:
            if op.done:
                self._finish(op)
        self._stir()

    def _finish(self, op: Operation) -> None:
        queue = self._queues[op.rank][op.communicator]
        assert queue.popleft() is op
        self._running[op.rank] -= 1
        if op.in_place is not None:
            op.forget_sent()
            poison(op.in_place)

    def _stir(self) -> None:
        self._moved_at = time.monotonic()
        self._changed.notify_all()

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except RuleBroken as error:
            self._fail(error)

    def _fail(self, error: RuleBroken) -> NoReturn:
        self.broken = self.broken or error
        self._changed.notify_all()
        raise error

    def _raise_if_over(self) -> None:
        if self.broken is not None:
            raise type(self.broken)(str(self.broken))
        if self._ended:
            raise RuntimeError("the ranks were ended")

    def _state(self) -> str:
        """Who waits for what."""
        lines = []
        for rank in self.ranks:
            running = [str(op) for op in self._heads(rank) if op.launched]
            behind = [str(op) for queue in self._queues[rank].values() for op in queue if not op.launched]
            parts = (
                f"Rank {rank}: host waits for {self._hosts.get(rank, 'nothing')}",
                f"under way: {'; '.join(running) or 'nothing'}",
                f"queued: {'; '.join(behind) or 'nothing'}",
            )
            lines.append("; ".join(parts) + ".")
        return " ".join(lines)


def _check_untouched(into: torch.Tensor, op: Operation) -> None:
    if not is_poisoned(into):
        raise RuleBroken(f"what is received into was written before the operation was waited for: {op}")
