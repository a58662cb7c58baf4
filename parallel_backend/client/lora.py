"""Additions to a checkpoint's tensors (LoRA and similar adapters), and the messages that send them to the ranks."""

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.spans import Span
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import Poll, wait_for
from parallel_backend.wire.loading import Adapt, Adapted, AdaptersSent, DropAdapters, Loaded, Weigh


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


TakeRoom = Callable[[int, Adapt], None]
"""(rank, part of a delta) -> None. Makes room on the rank."""


class Adaptation:
    """The additions to one model's weights on its ranks. Thread-safe."""

    def __init__(
        self, ranks: ModelRanks, checkpoint: Checkpoint, loaded: Sequence[Loaded], answered: Callable[[Future], None]
    ):
        """`loaded`: the ranks' replies to Load. `answered`: called with the ranks' replies (Adapted) on the pool's
        thread."""
        self.bytes = [0] * len(loaded)
        """By rank, bytes of the additions."""
        self._ranks, self._checkpoint, self._answered = ranks, checkpoint, answered
        self._parameters = [frozenset(reply.parameters) for reply in loaded]
        self.in_place: tuple[Hashable | None, tuple[float, ...]] = None, ()
        """Name of the deltas with which the ranks compute, and the strengths of the groups 1, 2, ..."""
        self._lock = threading.Lock()

    @property
    def present(self) -> bool:
        """Whether the weights have additions."""
        return self.in_place[0] is not None

    def replace(
        self,
        name: Hashable | None,
        deltas: Iterable[Delta],
        strengths: tuple[float, ...],
        check: Callable[[], None],
        poll: Poll,
        room: TakeRoom,
    ) -> None:
        """Replace the ranks' deltas, see RemoteTransformer.adapt. `check` raises if the model is not on its ranks any more.
        `room(rank, part)` is called before a part is sent to a rank, and after the message to drop earlier deltas.
        """
        with self._lock:
            check()
            if (name, strengths) == self.in_place:
                return
            (known, weighed), self.in_place = self.in_place, (object(), ())  # equals no other name, until all is in place
            if name != known:
                weighed = ()
                self._send_all(deltas, poll, room)
            if strengths != weighed:
                for rank in range(len(self.bytes)):
                    self._ranks.send(rank, Weigh(strengths))
            self.bytes = [reply.adapter_bytes for reply in self._all_in_place(poll)]
            self.in_place = name, strengths

    def drop(self) -> list[int]:
        """Free the additions on all ranks, without waiting. Returns the bytes that become free, by rank; 0 while some are
        being sent. The next `replace` sends everything, even under the same name."""
        if not self._lock.acquire(blocking=False):
            return [0] * len(self.bytes)
        try:
            freed, self.bytes = self.bytes, [0] * len(self.bytes)
            if any(freed):
                self.in_place = object(), ()
                self._send_all((), lambda: None, lambda rank, part: None)
                self._ranks.ask(AdaptersSent(), Adapted).add_done_callback(self._answered)
            return freed
        finally:
            self._lock.release()

    def _send_all(self, deltas: Iterable[Delta], poll: Poll, room: TakeRoom) -> None:
        """Replace the ranks' deltas with these. `poll` is called between messages, and may raise."""
        for rank in range(len(self._parameters)):
            self._ranks.send(rank, DropAdapters())
        for delta in deltas:
            part = self._addition(delta)
            poll()
            ranks = [rank for rank, names in enumerate(self._parameters) if part.parameter in names]
            assert ranks, f"no rank has {part.parameter}"
            for rank in ranks:
                room(rank, part)
                self._ranks.send(rank, part)

    def _addition(self, delta: Delta) -> Adapt:
        """Return the message that adds `delta` to a parameter of the class. `delta` names a tensor of the checkpoint; the
        parameter has that tensor's values."""
        parameter = self._checkpoint.targets[delta.key]
        length, *others = self._checkpoint.shape(parameter)
        rows, up = delta.rows or Span(0, length), delta.up
        width = others if delta.down is None else [len(delta.down)]
        assert list(up.shape) == [len(rows), *width], f"{delta.key}: {list(up.shape)}"  # checked on the MODEL
        if len(rows) < length:
            up = up.new_zeros(length, *up.shape[1:])
            up[rows.slice] = delta.up
        return Adapt(parameter, up, delta.down, delta.scale, delta.group, delta.instead)

    def _all_in_place(self, poll: Poll) -> list[Adapted]:
        """Return the ranks' replies, in rank order, after they have handled everything that was sent."""
        answered = self._ranks.ask(AdaptersSent(), Adapted)
        answered.add_done_callback(self._answered)  # in the order of the ranks' replies, unlike what follows
        return wait_for(answered, poll)
