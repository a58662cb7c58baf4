"""The micro-steps of a model's calls, from the client to the ranks and back: in order, a window of them at a time."""

from collections import deque
from collections.abc import Callable

import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.pipefusion_order import entry_parts, window
from parallel_backend.core.spans import Span
from parallel_backend.wire import messages as m

from .call import PartialOutput, PostedCall, PostedStep


class MicroSteps:
    """Not thread-safe: the client locks. What it is given is called under that lock.

    `patch`: values that an output's token has for each channel. `send(replica, step)` sends a micro-step to its ranks.
    `done(seq)`: all outputs of that micro-step are there.
    `shard(call, index)`: the rows of the call's output that the sequence rank of this number computes, as spans.
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
        # By replica, the ranks that give out its micro-steps' outputs; by micro-step, those whose part is still to come.
        self._output_ranks = [
            frozenset(degrees.ranks(replica, degrees.pipe - 1, index)[0] for index in range(degrees.sequence))
            for replica in range(degrees.batch)
        ]
        self._awaited_ranks: dict[int, set[int]] = {}
        self._width: int | None = None  # of an output's tokens, as the first of them has it

    def post(self, call: PostedCall) -> None:
        """Queue the call's micro-steps, and send what the window allows. What `send` raises is raised: then of the call
        nothing more is sent."""
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
        """Of these calls nothing more is sent; what is under way finishes."""
        for waiting in self._waiting:
            kept = [step for step in waiting if not which(step.assembly.call)]
            waiting.clear()
            waiting.extend(kept)

    def accept(self, output: m.Output, finite: bool) -> tuple[PartialOutput, bool, bool] | None:
        """Put a rank's part in its place, and send what the window now allows. `finite`: whether all its values are.

        What it is a part of, whether that is complete now, and whether this part is the first of it that is not finite.
        None for what a cancelled run left. BadMessage for an output that nobody waits for from this rank,
        and for one of another shape.
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
        """Some are under way or wait."""
        return any(self._waiting) or any(self._in_flight)

    def end(self) -> list[PostedCall]:
        """Forget all; the calls that had not ended."""
        steps = [step for queue in (*self._waiting, *(flying.values() for flying in self._in_flight)) for step in queue]
        for waiting in self._waiting:
            waiting.clear()
        for flying in self._in_flight:
            flying.clear()
        self._awaited_ranks.clear()
        return list({id(step.assembly): step.assembly.call for step in steps}.values())

    def _fill(self, replica: int) -> None:
        """Send waiting micro-steps while fewer than the window are under way.

        The window keeps every stage busy and one micro-step ahead, and no more: what is sent cannot be called back.
        """
        waiting, flying = self._waiting[replica], self._in_flight[replica]
        while waiting and len(flying) < self._window:
            step = waiting.popleft()
            self._send(replica, step)
            flying[step.seq] = step
            self._awaited_ranks[step.seq] = set(self._output_ranks[replica])

    def _check(self, value: torch.Tensor, entries: int, tokens: int) -> None:
        """BadMessage unless it is [entries, tokens, c] of numbers, c being the same for all outputs of the model."""
        width = value.shape[-1] if self._width is None and value.ndim == 3 else self._width
        if value.shape != (entries, tokens, width) or not width or width % self._patch or not value.is_floating_point():
            raise m.BadMessage(f"an output of {value.dtype} {list(value.shape)} for {entries} entries and {tokens} tokens")
        self._width = width
