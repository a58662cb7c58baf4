"""The queue of a model's micro-steps, which are sent to the ranks in order, a window at a time."""

from collections import deque
from collections.abc import Callable

import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.pipefusion_order import entry_parts, window
from parallel_backend.core.spans import Span
from parallel_backend.wire import messages as m

from .call import PartialOutput, PostedCall, PostedStep


class MicroSteps:
    """Not thread-safe: Posting locks, and the functions below are called under its lock.

    `patch`: number of values of an output token for each channel. `send(replica, step)` sends a micro-step to the ranks.
    `done(seq)` is called when all outputs of a micro-step have come. `shard(call, index)`: spans of the rows of the call's
    output that sequence rank `index` computes.
    """

    def __init__(
        self,
        degrees: Degrees,
        patch: int,
        send: Callable[[int, PostedStep], None],
        done: Callable[[int], None],
        shard: Callable[[PostedCall, int], tuple[Span, ...]],
    ):
        self._degrees, self._patch, self._send, self._done, self._shard = degrees, patch, send, done, shard
        self._newest = 0  # number of the newest micro-step, sent or waiting
        self._window = window(degrees.pipe)
        self._waiting: list[deque[PostedStep]] = [deque() for _ in range(degrees.batch)]
        self._in_flight: list[dict[int, PostedStep]] = [{} for _ in range(degrees.batch)]
        # By replica, the ranks that send outputs; below, by micro-step, the ranks whose output has not come.
        self._output_ranks = [
            frozenset(degrees.ranks(replica, degrees.pipe - 1, index)[0] for index in range(degrees.sequence))
            for replica in range(degrees.batch)
        ]
        self._awaited_ranks: dict[int, set[int]] = {}
        self._width: int | None = None  # values of an output token, by the first output

    def post(self, call: PostedCall) -> None:
        """Queue the call's micro-steps, and send those that the window allows. If `send` raises, the others are dropped."""
        whole = call.tokens == call.conditioning.token_order.span
        apart = whole and not call.conditioning.changes.together
        shares = call.conditioning.shares(self._degrees.batch)
        by_replica = [entry_parts(entries, apart, self._degrees.pipe) for entries in shares]
        assembly = PartialOutput(call, self._newest + 1, sum(map(len, by_replica)) * self._degrees.sequence)
        for entries, parts, waiting in zip(shares, by_replica, self._waiting, strict=True):
            for part in parts:
                self._newest += 1
                waiting.append(PostedStep(self._newest, assembly, part, part.shift(-entries.start)))
        try:
            for replica in range(self._degrees.batch):
                self._fill(replica)
        except BaseException:
            self.forget(lambda other: other is call)
            raise

    def forget(self, which: Callable[[PostedCall], bool]) -> None:
        """Drop the waiting micro-steps of these calls. Those under way finish."""
        for waiting in self._waiting:
            kept = [step for step in waiting if not which(step.assembly.call)]
            waiting.clear()
            waiting.extend(kept)

    def accept(self, output: m.Output, finite: bool) -> tuple[PartialOutput, bool, bool] | None:
        """Add a rank's output, and send micro-steps that the window now allows. `finite`: all values of it are finite.

        (the call's output, whether it is complete now, whether this is its first part that is not finite). None for an
        output of a cancelled run. BadMessage for an unexpected output, or one of a wrong shape.
        """
        at = self._degrees.coordinate(output.rank)
        flying = self._in_flight[at.batch]
        step = flying.get(output.seq)
        if step is None and output.seq <= self._newest:
            return None
        if step is None or output.rank not in self._awaited_ranks[output.seq]:
            raise m.BadMessage(f"an output of micro-step {output.seq}, which nobody waits for")
        assembly = step.assembly
        rows = self._shard(assembly.call, self._degrees.sequence_index(at))
        self._check(output.value, len(step.entries), sum(map(len, rows)))
        complete = assembly.put(step.entries, rows, output.value)
        nonfinite = not finite and not assembly.nonfinite
        assembly.nonfinite |= nonfinite
        self._awaited_ranks[output.seq].remove(output.rank)
        if not self._awaited_ranks[output.seq]:
            del self._awaited_ranks[output.seq], flying[output.seq]
            self._done(output.seq)
            self._fill(at.batch)
        return assembly, complete, nonfinite

    @property
    def busy(self) -> bool:
        """Whether micro-steps are under way or waiting."""
        return any(self._waiting) or any(self._in_flight)

    def end(self) -> list[PostedCall]:
        """Drop all micro-steps. Returns the calls that had not ended."""
        steps = [step for queue in (*self._waiting, *(flying.values() for flying in self._in_flight)) for step in queue]
        for waiting in self._waiting:
            waiting.clear()
        for flying in self._in_flight:
            flying.clear()
        self._awaited_ranks.clear()
        return list({id(step.assembly): step.assembly.call for step in steps}.values())

    def _fill(self, replica: int) -> None:
        """Send waiting micro-steps while fewer than the window are under way.

        The window keeps every stage busy. It is not larger, because micro-steps that are sent cannot be cancelled.
        """
        waiting, flying = self._waiting[replica], self._in_flight[replica]
        while waiting and len(flying) < self._window:
            step = waiting.popleft()
            self._send(replica, step)
            flying[step.seq] = step
            self._awaited_ranks[step.seq] = set(self._output_ranks[replica])

    def _check(self, value: torch.Tensor, entries: int, tokens: int) -> None:
        """BadMessage unless `value` is [entries, tokens, c] of floats, with the same c for all outputs of the model."""
        width = value.shape[-1] if self._width is None and value.ndim == 3 else self._width
        if value.shape != (entries, tokens, width) or not width or width % self._patch or not value.is_floating_point():
            raise m.BadMessage(f"an output of {value.dtype} {list(value.shape)} for {entries} entries and {tokens} tokens")
        self._width = width
