"""Collects the replies of ranks to a request until each of the ranks that were asked has sent one."""

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from parallel_backend.wire.encoding import BadMessage

from .failure_report import again


@dataclass
class _Gather:
    """One request to `ranks`. `reply` is the type of the replies; `replies` maps each rank to its reply so far."""

    reply: type
    ranks: Sequence[int]
    future: Future = field(default_factory=Future)
    replies: dict[int, Any] = field(default_factory=dict)


class Gathers:
    """The unanswered requests of a pool of `world` ranks, by request id. Thread-safe."""

    def __init__(self, world: int):
        self._world = world
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._open: dict[int, _Gather] = {}
        self._error: Exception | None = None

    def open(self, reply: type, ranks: Sequence[int] | None = None) -> tuple[int, Future]:
        """Return the id of a new request, and the future of its replies, which are of type `reply`.

        `ranks` are the ranks that are asked, ascending; None: all. The future's list has their replies in this order, and
        `rank` of each reply is set to its index in the list.
        """
        gather = _Gather(reply, range(self._world) if ranks is None else ranks)
        with self._lock:
            request_id = next(self._ids)
            if self._error is None:
                self._open[request_id] = gather
            else:
                gather.future.set_exception(again(self._error))
        return request_id, gather.future

    def drop(self, request_id: int) -> None:
        """Forget a request that was not sent to all ranks."""
        with self._lock:
            self._open.pop(request_id, None)

    def add(self, request_id: int | None, rank: int, reply: Any) -> None:
        """Store a rank's reply. A reply without an open request is dropped. Raises BadMessage if the reply has the wrong
        type."""
        with self._lock:
            if request_id is None or (gather := self._open.get(request_id)) is None:
                return
            if type(reply) is not gather.reply:
                raise BadMessage(f"{type(reply).__name__} in reply to a request for {gather.reply.__name__}")
            if rank not in gather.ranks:
                raise BadMessage(f"{type(reply).__name__} in reply to a request for other ranks")
            gather.replies[rank] = reply
            complete = len(gather.replies) == len(gather.ranks)
            if complete:
                del self._open[request_id]
        if complete:
            replies = [gather.replies[rank] for rank in gather.ranks]
            numbered = zip(range(len(replies)), gather.ranks, replies, strict=True)
            gather.future.set_result(
                [each if place == rank else replace(each, rank=place) for place, rank, each in numbered]
            )

    @property
    def awaited(self) -> list[type]:
        """The types of the replies that open requests wait for."""
        with self._lock:
            return [gather.reply for gather in self._open.values()]

    def fail(self, error: Exception) -> None:
        """Let all requests, also those opened later, fail with `error`."""
        with self._lock:
            self._error = error
            gathers, self._open = self._open, {}
        for gather in gathers.values():
            gather.future.set_exception(again(error))
