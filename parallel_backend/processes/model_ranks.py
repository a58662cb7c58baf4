"""The ranks of a pool as one of the models on them speaks to them."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from parallel_backend.wire import messages as m
from parallel_backend.wire.shared_memory import Segment

from .pool import Pool


class ModelRanks:
    """One model's place on a pool: what it sends is for that model alone, by its `number`.

    `keep_others`: other models stay on the ranks. `on_output`, `on_loading`, `on_failure`: see `listen`. Methods without a
    word are the pool's.
    """

    def __init__(self, pool: Pool, keep_others: bool = False):
        self.on_output: Callable[[m.Output], None] = lambda output: None
        self.on_loading: Callable[[m.Loading], None] = lambda loading: None
        self.on_failure: Callable[[Exception], None] = lambda error: None
        self.pool, self.number = pool, pool.enter(self, keep_others)

    def listen(
        self,
        on_output: Callable[[m.Output], None],
        on_loading: Callable[[m.Loading], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """From now on these get every Output and Loading of the model, and the pool's failure, on the pool's own thread.
        `on_failure` is told too when the model has to go."""
        self.on_output, self.on_loading, self.on_failure = on_output, on_loading, on_failure

    @property
    def devices(self) -> tuple[str, ...]:
        return self.pool.devices

    @property
    def error(self) -> Exception | None:
        return self.pool.error

    def send(self, rank: int, message: Any) -> None:
        self.pool.send(rank, message, None, self.number)

    def ask(self, message: Any, reply: type) -> Future:
        return self.pool.ask(message, reply, self.number)

    def tell(self, message: Any) -> None:
        self.pool.tell(message, self.number)

    def together(self) -> AbstractContextManager[None]:
        return self.pool.together()

    def refuse(self, rank: int, why: str) -> Exception:
        return self.pool.refuse(rank, why)

    def leave(self) -> None:
        """The model has no place any more. See Pool.leave."""
        self.pool.leave(self.number)

    def next_segment(self) -> int:
        """A number for a segment of shared memory, which no other one of these ranks has."""
        return next(self.pool.segments)

    def lends_to(self, rank: int) -> bool:
        return self.pool.lends_to(rank)

    def lend(self, rank: int, segment: Segment) -> None:
        self.pool.lend(rank, segment, self.number)

    def drop(self, rank: int, segment: Segment) -> None:
        self.pool.drop(rank, segment)

    def forget(self, rank: int, segment: Segment) -> None:
        self.pool.forget(rank, segment)
