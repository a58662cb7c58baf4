"""The ranks of a pool, as one of the models on them uses them."""

from collections.abc import Callable

from parallel_backend.wire import messages as m

from .pool_part import PoolPart, SomeRanks


class ModelRanks(PoolPart):
    """Marks one model's messages to a pool with the model's `number`, and receives the ranks' messages about the model.

    `keep_others`: other models on the ranks stay. Methods without a docstring: see Pool and pool.Listener.
    """

    number: int

    def __init__(self, pool: SomeRanks, keep_others: bool = False):
        super().__init__(pool.whole, pool.part_ranks or tuple(range(len(pool.devices))), pool.threads)
        self.loaded = [0.0] * len(pool.devices)
        """The share of its weights that each rank has loaded."""
        self._on_output: Callable[[m.Output], None] = lambda output: None
        self._on_failure: Callable[[Exception], None] = lambda error: None
        self._failure: Exception | None = None
        self.pool, self.number = pool, pool.enter(self, keep_others)

    def listen(self, on_output: Callable[[m.Output], None], on_failure: Callable[[Exception], None]) -> None:
        """From now on `on_output` gets every Output of the model, and `on_failure` the error that ends the model, at once if
        it has ended already. Both are called as those of pool.Listener."""
        self._on_output, self._on_failure = on_output, on_failure
        if self._failure is not None:
            on_failure(self._failure)

    def on_output(self, output: m.Output) -> None:
        self._on_output(output)

    def on_loading(self, loading: m.Loading) -> None:
        self.loaded[loading.rank] = loading.fraction

    def on_failure(self, error: Exception) -> None:
        self._failure = error
        self._on_failure(error)

    def leave(self) -> None:
        """The model leaves the ranks, see Pool.leave."""
        self.whole.leave(self.number)

    def next_segment(self) -> int:
        """A number for a segment of shared memory, unique on these ranks."""
        return next(self.segments)
