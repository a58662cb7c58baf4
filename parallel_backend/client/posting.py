"""Sends model calls to the ranks of one model, cut into micro-steps, and completes calls with the ranks' outputs."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch

from parallel_backend.core.degrees import SEQUENCE_AXES, WIDGETS, Degrees
from parallel_backend.core.pipefusion_order import entry_parts, window
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.residuals import AROUND
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import again
from parallel_backend.wire import messages as m

from .call import CallCut, Conditioning, ModelCall, PartialOutput, PostedCall, PostedStep, TokenLayout, fail
from .conditioning_cache import ConditioningCache
from .not_finite import all_finite
from .resident_weights import ResidentWeights
from .shared_residuals import SharedResiduals


class Posting:
    """A queue of micro-steps, which are sent to the ranks in order, a window at a time. Thread-safe.

    `patch`: number of values of an output token for each channel. `cut`: how a stage's tokens are split over sequence ranks.
    `shared`: the residuals of micro-steps in progress. `resident` is woken before a micro-step is sent, because weights may
    have left the devices since its call was posted. `lock` is held while anything is sent for the model, so that all
    ranks get the messages in one order. `not_finite`: returns the error for a call whose output is not finite.
    """

    def __init__(
        self,
        degrees: Degrees,
        patch: int,
        cut: SequenceCut,
        ranks: ModelRanks,
        shared: SharedResiduals,
        conditionings: ConditioningCache,
        not_finite: Callable[[PostedCall], Exception],
        resident: ResidentWeights,
        lock: threading.RLock,
    ):
        self._degrees, self._patch, self._cut, self._ranks, self._shared = degrees, patch, cut, ranks, shared
        self._conditionings, self._not_finite, self._resident, self.lock = conditionings, not_finite, resident, lock
        self.error: Exception | None = None
        """Why the model is no longer on its ranks, see `end`. None: it is."""
        self.answered = 0
        """Number of calls so far whose outputs have all arrived."""
        self._newest = 0  # number of the newest micro-step, sent or waiting
        self._window = window(degrees.pipe)
        self._waiting: list[deque[PostedStep]] = [deque() for _ in range(degrees.batch)]
        self._in_flight: list[dict[int, PostedStep]] = [{} for _ in range(degrees.batch)]
        # By replica: its ranks with their sequence index, stage by stage.
        self._ranks_of = [
            [
                (rank, index)
                for stage in range(degrees.pipe)
                for index in range(degrees.sequence)
                for rank in degrees.ranks(replica, stage, index)
            ]
            for replica in range(degrees.batch)
        ]
        # By replica, the ranks that send outputs.
        self._output_ranks = [
            frozenset(degrees.ranks(replica, degrees.pipe - 1, index)[0] for index in range(degrees.sequence))
            for replica in range(degrees.batch)
        ]
        self._width: int | None = None  # values of an output token, by the first output

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Context in which no other thread sends for this model. Raises the model's error if it has one, see `end`."""
        with self.lock:
            self.check()
            yield

    def check(self) -> None:
        """Raise the model's error if it has one, see `end`."""
        if self.error is not None:
            raise again(self.error)

    def conditioning(self, call: ModelCall, layout: TokenLayout) -> Conditioning:
        """Return the ranks' copy of the call's conditioning, see ConditioningCache."""
        with self.lock:
            self.check()
            return self._conditionings.find(call, layout)

    def post(self, call: PostedCall) -> None:
        """Queue the call's micro-steps, and send those that the window allows. `call.future` gives tokens [B, n + a, c] on
        the CPU.

        If a micro-step cannot be sent, the others are dropped. Raises ValueError if there are fewer tokens than sequence
        ranks.
        """
        key = call.tokens, call.companion_tokens
        cut = call.conditioning.cuts.get(key) or call.conditioning.cuts.setdefault(key, self._new_cut(call))
        with self.lock:
            if self.error is not None:
                fail(call.future, self.error)
                return
            output = PartialOutput(call, cut)
            for parts, waiting, ranks in zip(cut.parts, self._waiting, self._output_ranks, strict=True):
                for entries, local in parts:
                    self._newest += 1
                    waiting.append(PostedStep(self._newest, output, entries, local, set(ranks)))
            try:
                for replica in range(self._degrees.batch):
                    self._fill(replica)
            except BaseException:
                self.abandon(lambda other: other is call)
                raise

    @property
    def busy(self) -> bool:
        """Whether micro-steps are in progress or waiting."""
        with self.lock:
            return any(self._waiting) or any(self._in_flight)

    def abandon(self, which: Callable[[PostedCall], bool]) -> None:
        """Drop the calls for which `which` is true: waiting micro-steps are not sent, and outputs of those in progress are
        ignored."""
        with self.lock:
            for waiting in self._waiting:
                kept = [step for step in waiting if not which(step.output.call)]
                waiting.clear()
                waiting.extend(kept)

    def end(self, error: Exception) -> None:
        """Record that the model has left the ranks: every call, waiting or later, raises `error`."""
        with self.lock:
            self.error = error
            self._conditionings.clear()
            steps = [step for queue in (*self._waiting, *(each.values() for each in self._in_flight)) for step in queue]
            for waiting, flying in zip(self._waiting, self._in_flight, strict=True):
                waiting.clear()
                flying.clear()
            self._shared.close()
        for call in {id(step.output): step.output.call for step in steps}.values():
            fail(call.future, error)

    def on_output(self, output: m.Output) -> None:
        """Add an output, and complete its call if this was the last one. Raises BadMessage, see `_accept`."""
        with self.lock:
            accepted = self._accept(output)
        if accepted is None:
            return
        whole, complete = accepted
        if not all_finite(output.value):
            fail(whole.call.future, self._not_finite(whole.call))
        elif complete and not whole.call.future.done():
            self.answered += 1
            whole.call.future.set_result(whole.tokens())

    def _accept(self, output: m.Output) -> tuple[PartialOutput, bool] | None:
        """Add a rank's output, and send micro-steps that the window now allows.

        Returns (the call's output, whether it is complete now). None for an output of a cancelled run. Raises BadMessage
        for an unexpected output, or one of a wrong shape.
        """
        at = self._degrees.coordinate(output.rank)
        flying = self._in_flight[at.batch]
        step = flying.get(output.seq)
        if step is None and output.seq <= self._newest:
            return None
        if step is None or output.rank not in step.awaited:
            raise m.BadMessage(f"an output of micro-step {output.seq}, which nobody waits for")
        whole, index = step.output, self._degrees.sequence_index(at)
        rows = whole.shards[index][: 1 + self._cut.gives_companion(index)]
        self._check_value(output.value, len(step.entries), sum(map(len, rows)))
        complete = whole.put(step.entries, rows, output.value)
        step.awaited.remove(output.rank)
        if not step.awaited:
            del flying[output.seq]
            self._shared.done(output.seq)
            self._fill(at.batch)
        return whole, complete

    def _check_value(self, value: torch.Tensor, entries: int, tokens: int) -> None:
        """Raise BadMessage unless `value` is floats [entries, tokens, c], with the same c for all outputs of the model."""
        width = value.shape[-1] if self._width is None and value.ndim == 3 else self._width
        if value.shape != (entries, tokens, width) or not width or width % self._patch or not value.is_floating_point():
            raise m.BadMessage(f"an output of {value.dtype} {list(value.shape)} for {entries} entries and {tokens} tokens")
        self._width = width

    def _new_cut(self, call: PostedCall) -> CallCut:
        """Return how the call is cut into parts. The result also suits later calls of the conditioning with the same
        tokens."""
        conditioning, degrees = call.conditioning, self._degrees
        if not all(map(len, self._cut.parts(call.tokens))):
            sizes = {axis: getattr(degrees, axis) for axis in SEQUENCE_AXES}
            cutting = " x ".join(f"{WIDGETS[axis]} {size}" for axis, size in sizes.items() if size > 1)
            raise ValueError(
                f"{cutting} cuts this image (or patch of it), which has only {len(call.tokens)} tokens. Each rank needs at "
                "least one. Use a larger image, fewer patches or smaller degrees."
            )
        apart = call.tokens == conditioning.token_order.span and not conditioning.changes.together
        parts = tuple(
            tuple((part, part.shift(-entries.start)) for part in entry_parts(entries, apart, degrees.pipe))
            for entries in conditioning.shares(degrees.batch)
        )
        return CallCut(tuple(call.rows(self._cut)), parts)

    def _fill(self, replica: int) -> None:
        """Send waiting micro-steps while fewer than the window are in progress. The window keeps every stage busy. It is not
        larger, because micro-steps that are sent cannot be cancelled."""
        waiting, flying = self._waiting[replica], self._in_flight[replica]
        while waiting and len(flying) < self._window:
            step = waiting.popleft()
            self._send(replica, step)
            flying[step.seq] = step

    def _send(self, replica: int, step: PostedStep) -> None:
        """Send each rank of the replica its tokens of a micro-step. All stages get latents and residuals."""
        try:
            if self._resident.parked:
                self._resident.wake()
            messages = self._messages(replica, step)
            self._ranks.send_each([(rank, messages[index]) for rank, index in self._ranks_of[replica]])
        except BaseException:
            self._shared.done(step.seq)
            raise

    def _messages(self, replica: int, step: PostedStep) -> list[m.Step]:
        """Return the message for each sequence rank."""
        call, entries, shards = step.output.call, step.entries.slice, step.output.shards
        names, added = self._added(replica, step) if call.residuals else ((), [()] * len(shards))
        messages = []
        for (images, companion), of_rank in zip(shards, added, strict=True):
            x = call.x[entries, images.slice]
            if len(companion):
                x = torch.cat((x, call.x[entries, companion.slice]), dim=1)
            message = m.Step(
                seq=step.seq,
                run=call.run,
                conditioning=call.conditioning.id,
                tokens=call.tokens,
                with_text=call.with_text,
                stale=call.stale,
                overlap=call.overlap,
                entries=step.local,
                timestep=call.timestep[entries],
                residuals=names,
                added=of_rank,
                x=x,
            )
            messages.append(message)
        return messages

    def _added(self, replica: int, step: PostedStep) -> tuple[tuple[tuple[str, int], ...], list[tuple[torch.Tensor, ...]]]:
        """(the call's residuals by name, each with the number of its tensor; for each sequence rank, its rows of these
        tensors). Ranks that need the same rows share one copy."""
        # A ControlNet with few blocks uses one tensor for several blocks of the model: it is sent once.
        call, entries, shards = step.output.call, step.entries.slice, step.output.shards
        tensors = list({id(tensor): tensor for tensor in call.residuals.values()}.values())
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        names = tuple((name, numbers[id(tensor)]) for name, tensor in call.residuals.items())
        of_all = {id(tensor) for name, tensor in call.residuals.items() if name.startswith(AROUND)}

        def rows(tensor: torch.Tensor, images: Span) -> Span:
            return Span(0, tensor.shape[1]) if id(tensor) in of_all else images

        parts = {
            (id(tensor), rows(tensor, images)): tensor[entries, rows(tensor, images).slice]
            for images, _ in shards
            for tensor in tensors
        }
        placed = dict(zip(parts, self._shared.place(replica, step.seq, list(parts.values())), strict=True))
        return names, [tuple(placed[id(tensor), rows(tensor, images)] for tensor in tensors) for images, _ in shards]
