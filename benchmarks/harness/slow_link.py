"""torch.distributed's Gloo over links that are as slow as wanted, for processes of one machine.

`slow_down(folder)` in each process, before it joins: from then on its groups are Gloo's, and every message between two
ranks is done when a queue of its own says so, rather than when Gloo is. Nothing but torch is needed, so that peers with an
interpreter of their own can have it too.

The queue. Each rank has one port to a switch that is never the limit, as a slot or a network card has: a way out and a way
in, each with `bytes_per_second`. A message begins when both of its ends have been called for, its sender's way out and its
receiver's way in are free, and takes bytes / bytes_per_second; it is sent then, and received `latency` seconds later. So
each direction has one message at a time, in the order in which they could begin, and both directions run at once. Who waits
sleeps: a message under way takes no core beyond what Gloo's own copy takes, which is over long before.

Collectives count as the messages of their usual algorithm: an all-to-all and an all-gather as one from each rank straight
to each other one, an all-reduce as what the ring algorithm sends to the next rank, 2 (N - 1) / N of the tensor, with the
latencies of its 2 (N - 1) rounds. A barrier is free. Anything else raises.
"""

import fcntl
import hashlib
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

NAME = "slow"
"""Of the backend that stands in for gloo."""
FULL_SPEED = float("inf")
TURNS = 1024
"""Messages of two ranks in one direction that may be under way at once."""
_DOUBLE = 8


class SharedNumbers:
    """Doubles in a file that several processes map; all zero at first."""

    def __init__(self, path: Path, count: int):
        with path.open("a+b") as file:
            file.truncate(_DOUBLE * count)  # the same for whoever comes first
            self._memory = mmap.mmap(file.fileno(), _DOUBLE * count)
        self.values = memoryview(self._memory).cast("d")


class Switch:
    """The ports of `world` ranks, in a folder of their own. Times are time.monotonic's, the same in all processes."""

    def __init__(self, folder: Path, world: int):
        self.folder, self._world = folder, world
        self._numbers = SharedNumbers(folder / "ports", 2 + 2 * world)
        self._lock: int | None = None  # descriptor, while held

    def set(self, bytes_per_second: float, latency: float) -> None:
        """Of every port, from the next message on."""
        self._numbers.values[0], self._numbers.values[1] = bytes_per_second, latency

    @property
    def latency(self) -> float:
        return self._numbers.values[1]

    def occupy(self, source: int, target: int, size: int, now: float) -> float:
        """When a message that could begin now will have left. For whoever holds the lock."""
        values = self._numbers.values
        way_out, way_in = 2 + source, 2 + self._world + target
        end = max(now, values[way_out], values[way_in]) + size / values[0]
        values[way_out] = values[way_in] = end
        return end

    def __enter__(self) -> None:
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._lock = lock

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)


class Messages:
    """The messages of one group: the n-th that a rank sends to another is the n-th that the other receives from it."""

    def __init__(self, switch: Switch, name: str, ranks: Sequence[int], clock: Callable[[], float] = time.monotonic):
        """`name`: the group's, the same on its ranks and no other group's. `ranks`: their places at the switch."""
        self._switch, self._ranks, self._clock = switch, ranks, clock
        path = switch.folder / hashlib.sha256(f"{name} {list(ranks)}".encode()).hexdigest()
        self._turns = SharedNumbers(path, 2 * TURNS * len(ranks) ** 2)
        self._called: Counter[tuple[int, int, bool]] = Counter()

    def call(self, source: int, target: int, size: int, sends: bool) -> int:
        """One end of the next message from a rank of the group to another. Where its slot is, for `left`."""
        turn = self._called[source, target, sends]
        self._called[source, target, sends] += 1
        slot = 2 * (TURNS * (len(self._ranks) * source + target) + turn % TURNS)
        values = self._turns.values
        with self._switch:
            if values[slot] == turn + 1:  # the other end has been here
                now = self._clock()
                values[slot + 1] = self._switch.occupy(self._ranks[source], self._ranks[target], size, now)
            else:
                values[slot] = turn + 1
        return slot

    def left(self, slot: int) -> float:
        """When a message that both ends have been called for has left, or will have."""
        return self._turns.values[slot + 1]


@dataclass(frozen=True)
class Part:
    """One end of a message. `delay`: from when it has left to when it is done here."""

    slot: int
    delay: float


class SlowWork(dist.Work):
    """Of Gloo, and of the queue. `keep`: tensors that must live until then."""

    def __init__(self, work: dist.Work, messages: Messages, parts: list[Part]):
        super().__init__()
        self._work, self._messages, self._parts = work, messages, parts

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()  # so both ends of every message have been called for
        for part in self._parts:
            rest = self._messages.left(part.slot) + part.delay - time.monotonic()
            if rest > 0:
                time.sleep(rest)
        return True


class SlowGroup(dist.ProcessGroup):
    """A group of Gloo's behind the queue. Ranks are the group's own."""

    def __init__(self, gloo: dist.ProcessGroup, switch: Switch, messages: Messages):
        super().__init__(gloo.rank(), gloo.size())
        self._gloo, self._switch, self._messages = gloo, switch, messages

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def _send(self, target: int, size: int) -> Part:
        return Part(self._messages.call(self.rank(), target, size, sends=True), 0.0)

    def _receive(self, source: int, size: int, rounds: int = 1) -> Part:
        return Part(self._messages.call(source, self.rank(), size, sends=False), rounds * self._switch.latency)

    def _work(self, start: Callable[[], dist.Work], parts: list[Part]) -> SlowWork:
        return SlowWork(start(), self._messages, parts)

    def _around(self) -> list[tuple[int, int]]:
        """(to whom, from whom) in each turn of an exchange with everyone, so that no port has two at once."""
        return [((self.rank() + turn) % self.size(), (self.rank() - turn) % self.size()) for turn in range(1, self.size())]

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> SlowWork:
        parts = [self._send(target, tensor.nbytes) for tensor in tensors]
        return self._work(lambda: self._gloo.send(tensors, target, tag), parts)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> SlowWork:
        parts = [self._receive(source, tensor.nbytes) for tensor in tensors]
        return self._work(lambda: self._gloo.recv(tensors, source, tag), parts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        receive: list[int],
        send: list[int],
        options: object = dist.AllToAllOptions(),
    ) -> SlowWork:
        def sizes(tensor: torch.Tensor, counts: list[int]) -> list[int]:
            """Bytes by rank: `counts` of the first dimension, or all alike."""
            return [tensor.nbytes * count // max(1, len(tensor)) for count in counts] or [
                tensor.nbytes // self.size()
            ] * self.size()

        parts, leaving, coming = [], sizes(given, send), sizes(output, receive)
        for target, source in self._around():
            parts += [self._send(target, leaving[target]), self._receive(source, coming[source])]
        return self._work(lambda: self._gloo.alltoall_base(output, given, receive, send, options), parts)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: object) -> SlowWork:
        parts = self._gather(given.nbytes, [given.nbytes] * self.size())
        return self._work(lambda: self._gloo._allgather_base(output, given, options), parts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], given: list[torch.Tensor], options: object
    ) -> SlowWork:
        """What torch's functional collectives gather one tensor with; diffusers calls them."""
        assert len(outputs) == 1, len(outputs)
        return self._allgather_base(outputs[0], given[0], options)

    def allgather(self, outputs: list[list[torch.Tensor]], given: list[torch.Tensor], options: object) -> SlowWork:
        parts = self._gather(given[0].nbytes, [part.nbytes for part in outputs[0]])
        return self._work(lambda: self._gloo.allgather(outputs, given, options), parts)

    def _gather(self, own: int, others: list[int]) -> list[Part]:
        parts = []
        for target, source in self._around():
            parts += [self._send(target, own), self._receive(source, others[source])]
        return parts

    def allreduce(self, tensors: list[torch.Tensor], options: object = dist.AllreduceOptions()) -> SlowWork:
        parts, count = [], self.size()
        if count > 1:
            size = 2 * (count - 1) * tensors[0].nbytes // count
            before = (self.rank() - 1) % count
            parts = [self._send((self.rank() + 1) % count, size), self._receive(before, size, rounds=2 * (count - 1))]
        return self._work(lambda: self._gloo.allreduce(tensors, options), parts)

    def barrier(self, opts: object) -> dist.Work:
        return self._gloo.barrier(opts=opts)

    # torch's own functions call these by two names.
    all_to_all_single, all_gather_single = alltoall_base, _allgather_base


def slow_down(folder: Path, world: int) -> None:
    """This process's groups of gloo have slow links from now on. Before it joins, once.

    `folder`: the same for all `world` ranks of the pool, and no other pool's; a Switch there sets the speed.
    """
    switch = Switch(folder, world)

    def create(given: object, _options: object) -> SlowGroup:
        gloo = dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, timeout=given.timeout)
        ranks = list(given.global_ranks_in_group) or list(range(given.group_size))
        return SlowGroup(gloo, switch, Messages(switch, given.group_id, ranks))

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    start, more = dist.init_process_group, dist.new_group

    def init_process_group(backend: str, **named: object) -> None:
        assert backend == "gloo", backend
        start(NAME, **named)

    def new_group(*arguments: object, backend: str | None = None, **named: object) -> dist.ProcessGroup:
        """Peers name the backend of each group; without a name it is the first group's."""
        assert backend in ("gloo", None), backend
        return more(*arguments, backend=NAME, **named)

    dist.init_process_group, dist.new_group = init_process_group, new_group
