"""Additions to a checkpoint's tensors (LoRA and similar adapters), and the messages that send them to the ranks."""

import itertools
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.short_text import short
from parallel_backend.core.spans import Span
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import Poll, wait_for
from parallel_backend.wire.loading import Adapt, Adapted, AdaptersSent, DropAdapters, Loaded, Rescale, Weigh


@dataclass(frozen=True)
class Delta:
    """Adds `scale` * `up` [rows, r] @ `down` [r, columns] to the rows `rows` (None: all) of checkpoint tensor `key`. Without
    `down`, `up` has the shape of these rows. `key` is a name in the file."""

    key: str
    up: torch.Tensor
    down: torch.Tensor | None = None
    scale: float = 1.0
    rows: Span | None = None
    group: int = 0
    """The group whose strength scales the delta. Group 0 has strength 1."""
    instead: bool = False
    """Whether `up` replaces the checkpoint's tensor. Such a delta comes before other deltas of the key."""

    def has_factors_of(self, other: "Delta") -> bool:
        """Whether both have the same tensors in memory, for the same rows and group. Their scales may differ."""
        place = self.key, self.rows, self.group
        if place != (other.key, other.rows, other.group) or self.down is None or other.down is None:
            return False
        return _is_same(self.up, other.up) and _is_same(self.down, other.down)


TakeRoom = Callable[[int, Adapt], None]
"""(rank, part of a delta) -> None. Makes room on the rank."""


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())


class Deltas:
    """The deltas that the ranks have. `parameters`: names of each rank's parameters. `send`: (rank, message) -> None."""

    def __init__(self, checkpoint: Checkpoint, parameters: Sequence[Iterable[str]], send: Callable[[int, Any], None]):
        self._checkpoint, self._send = checkpoint, send
        self._parameters = [frozenset(names) for names in parameters]
        self._targets = {key: parameter for parameter, key in checkpoint.key_map.items()}
        self._known: list[Delta | None] = []  # sent last; None for a delta without `down`, too large to keep in memory
        self._order: list[list[int]] = []  # by rank, the index in `_known` of each Adapt that it was sent

    def replace(self, deltas: Iterable[Delta], poll: Callable[[], None], room: TakeRoom = lambda rank, part: None) -> None:
        """Replace the ranks' deltas by these. `poll` is called between messages, and may raise.

        `room(rank, part)` is called before a part is sent to a rank, after the message to drop earlier deltas. Only the
        scales are sent if all factors are those of the last time, in the same order and memory. Raises ValueError for a
        delta whose key or shape does not fit the checkpoint. After an error the next call sends everything.
        """
        known, self._known = self._known, []
        rest, same = iter(deltas), []
        for before, delta in zip(known, rest, strict=False):
            same.append(delta)
            if before is None or not delta.has_factors_of(before):
                break
        else:
            same += itertools.islice(rest, 1)
            if known and len(same) == len(known):
                for rank, order in enumerate(self._order):
                    self._send(rank, Rescale(tuple(same[number].scale for number in order)))
                self._known = known
                return
        self._order = [[] for _ in self._parameters]
        for rank in range(len(self._parameters)):
            self._send(rank, DropAdapters())
        sent: list[Delta | None] = []
        for number, delta in enumerate(itertools.chain(same, rest)):
            part = self.addition(delta)
            poll()
            ranks = [rank for rank, names in enumerate(self._parameters) if part.parameter in names]
            assert ranks, f"no rank has {part.parameter}"
            for rank in ranks:
                room(rank, part)
                self._send(rank, part)
                self._order[rank].append(number)
            sent.append(None if delta.down is None else delta)
        self._known = sent

    def addition(self, delta: Delta) -> Adapt:
        """Return the message that adds the delta to the parameter of its checkpoint tensor. Raises ValueError if it does not
        fit."""
        parameter = self._targets.get(delta.key)
        shape = (0,) if parameter is None else self._checkpoint.shape(parameter)
        rows = delta.rows or Span(0, shape[0])
        if parameter is None or rows.stop > shape[0] or not _fits(delta, len(rows), shape[1:]):
            raise ValueError(
                f"model: the LoRA for {short(delta.key)} does not fit {short(self._checkpoint.path.name)}: it is "
                f"{_shown(delta)}. Use a LoRA that was made for this model."
            )
        up = delta.up
        if len(rows) < shape[0]:
            up = delta.up.new_zeros(shape[0], *delta.up.shape[1:])
            up[rows.slice] = delta.up
        return Adapt(parameter, up, delta.down, delta.scale, delta.group, delta.instead)


def _fits(delta: Delta, rows: int, others: tuple[int, ...]) -> bool:
    """Whether the delta fits this number of rows of a tensor whose other sizes are `others`."""
    if delta.down is None:
        return tuple(delta.up.shape) == (rows, *others)
    return tuple(delta.up.shape) == (rows, len(delta.down)) and tuple(delta.down.shape[1:]) == (math.prod(others),)


def _shown(delta: Delta) -> str:
    """Return the shapes of a delta, for an error message."""
    return str(list(delta.up.shape)) + ("" if delta.down is None else f" times {list(delta.down.shape)}")


class Adaptation:
    """The additions to one model's weights on its ranks. Thread-safe."""

    def __init__(
        self, pool: ModelRanks, checkpoint: Checkpoint, loaded: Sequence[Loaded], answered: Callable[[Future], None]
    ):
        """`loaded`: the ranks' replies to Load. `answered`: called with the ranks' replies (Adapted) on the pool's
        thread."""
        self.bytes = [0] * len(loaded)
        """Bytes of the additions, by rank."""
        self._pool, self._answered = pool, answered
        self._deltas = Deltas(checkpoint, [reply.parameters for reply in loaded], pool.send)
        self._name: Hashable | None = None
        self._strengths: tuple[float, ...] = ()  # of the groups 1, 2, ...
        self._lock = threading.Lock()

    @property
    def present(self) -> bool:
        """Whether the weights have additions."""
        return self._name is not None

    def has(self, name: Hashable | None, strengths: tuple[float, ...]) -> bool:
        """Whether the ranks compute with the deltas of this name at these strengths."""
        return (name, strengths) == (self._name, self._strengths)

    def replace(
        self,
        name: Hashable | None,
        deltas: Iterable[Delta],
        strengths: tuple[float, ...],
        check: Callable[[], None],
        poll: Poll,
        room: TakeRoom,
    ) -> None:
        """Replace the ranks' deltas, see RemoteTransformer.adapt and Deltas.replace. `check` raises if the model is no
        longer on its ranks."""
        with self._lock:
            check()
            if self.has(name, strengths):
                return
            known, self._name = self._name, object()  # a name that equals no other, until all is in place
            if name != known:
                self._strengths = ()
                self._deltas.replace(deltas, poll, room)
            if strengths != self._strengths:
                for rank in range(len(self.bytes)):
                    self._pool.send(rank, Weigh(strengths))
            self.bytes = [reply.adapter_bytes for reply in self._all_in_place(poll)]
            self._name, self._strengths = name, strengths

    def drop(self) -> list[int]:
        """Free the additions on all ranks, without waiting. Returns the bytes that become free, by rank; 0 while some are
        being sent. The next `replace` sends everything, even under the same name."""
        if not self._lock.acquire(blocking=False):
            return [0] * len(self.bytes)
        try:
            freed, self.bytes = self.bytes, [0] * len(self.bytes)
            if any(freed):
                self._name, self._strengths = object(), ()
                self._deltas.replace((), lambda: None)
                self._pool.ask(AdaptersSent(), Adapted).add_done_callback(self._answered)
            return freed
        finally:
            self._lock.release()

    def _all_in_place(self, poll: Poll) -> list[Adapted]:
        """Return the ranks' replies, in rank order, after they have handled everything that was sent."""
        answered = self._pool.ask(AdaptersSent(), Adapted)
        answered.add_done_callback(self._answered)  # in the order of the ranks' replies, unlike what follows
        return wait_for(answered, poll)
