"""The ranks of a pool as seen by one of the models loaded on them."""

from collections.abc import Callable

from parallel_backend.wire import messages as m

from .pool_part import PoolPart, SomeRanks


class ModelRanks(PoolPart):
    """Adds one model's `number` to its messages to a pool, and receives the ranks' messages about the model. `keep_others`:
    other models on the ranks stay loaded. Methods without a docstring: see Pool and pool.Listener."""

    number: int

    def __init__(self, pool: SomeRanks, keep_others: bool = False):
        super().__init__(pool.whole, pool.part_ranks or tuple(range(len(pool.devices))), pool.threads)
        self.loaded = [0.0] * len(pool.devices)
        """For each rank, the fraction of its weights that it has loaded."""
        self._on_output: Callable[[m.Output], None] = lambda output: None
        self._on_failure: Callable[[Exception], None] = lambda error: None
        self._failure: Exception | None = None
        self.pool, self.number = pool, self.whole.enter(self, keep_others)

    def listen(self, on_output: Callable[[m.Output], None], on_failure: Callable[[Exception], None]) -> None:
        """Call `on_output` for every later Output of the model, and `on_failure` with the error that ends the model; at once
        if the model has ended already. They run on the threads on which pool.Listener's methods run."""
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
        """Remove the model from the pool, see Pool.leave."""
        self.whole.leave(self.number)

    def next_segment(self) -> int:
        """Return a number for a segment of shared memory, which is unique on these ranks."""
        return next(self.segments)
