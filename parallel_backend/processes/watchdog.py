"""Detects hangs: judges from the ranks' heartbeats whether they still work. Only time in which the client's threads also ran
counts, not time in which the machine slept or the client was stopped."""

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from parallel_backend.wire import messages as m

from .failure_text import LESS_MEMORY, RESTART, last_seen, unanswered

SILENCE_SECONDS = 20.0
"""Seconds without a heartbeat after which a rank counts as stopped. Heartbeats come every second during all work, but
loading a library from a slow disk can delay them."""
START_SECONDS = 300.0
"""Seconds within which one more rank must start or become ready. Importing torch takes a minute on a cold disk."""
FIRST_SECONDS = 1800.0
"""Seconds without progress of any rank that are allowed in work of unknown length, such as torch.compile's."""
STALL_SECONDS, STALL_FACTOR = 60.0, 20.0
"""Seconds without progress that are allowed in micro-steps no larger than a finished one: the larger of STALL_SECONDS and
STALL_FACTOR times the longest pause so far in micro-steps. Each block and each transfer counts as progress."""
UNANSWERED_SECONDS = 5.0
"""Seconds without an answer after which an error names the driver. A working rank's driver may not answer for minutes: a
thread that launches a kernel for the first time holds the driver until the queue has room."""
STEPS_REMEMBERED = 256
"""Number of micro-steps whose sizes are stored; far more than can be in progress."""
SLOW_REPLIES = (m.Probed, m.LinksProbed, m.Loaded, m.Adapted, m.Residency, m.VAEBegun, m.VAEOutput)
"""Types of replies to requests whose work has an unknown length."""


@dataclass(frozen=True)
class Verdict:
    """The ranks that the watchdog finds at fault."""

    ranks: tuple[int, ...]
    text: str
    """What these ranks did, as the end of a sentence that begins with their names."""
    hung: bool
    """Whether they still send heartbeats, so that their stacks can be dumped."""


class Watchdog:
    """Records the activity of a pool's ranks. Senders call `sent`, the receiving thread calls `heard`. `tick` judges on a
    separate thread, because the other threads may be blocked. The limits are attributes that may be changed."""

    def __init__(self, ranks: int, silence: float = SILENCE_SECONDS):
        self.silence, self.start = silence, START_SECONDS
        self.first, self.stall, self.factor = FIRST_SECONDS, STALL_SECONDS, STALL_FACTOR
        self.turns = 0
        """The number of times that the receiving thread has waited for messages."""
        self.receiving: int | None = None
        """The rank whose message the receiving thread is reading now."""
        self._lock = threading.Lock()
        self._all = tuple(range(ranks))
        self._beats: list[m.HeartbeatMessage | None] = [None] * ranks
        self._silent = [0.0] * ranks
        self._ready: set[int] = set()
        self._starting, self._shown = 0.0, 0
        self._compiling: set[int | None] = set()  # models with torch.compile
        # (model, number of the micro-step) -> (conditioning, size), or None once it is answered.
        self._steps: dict[tuple[int | None, int], tuple[int, int] | None] = {}
        self._largest: dict[tuple[int | None, int], int] = {}  # (model, conditioning) -> largest answered size
        self._longest = self._stalled = 0.0
        self._progress = self._turn = 0
        self._moved = self._in_step = False

    def doing(self, rank: int) -> str:
        """Return the rank's work by its last heartbeat; empty before the first."""
        beat = self._beats[rank]
        return "" if beat is None else beat.doing

    def beat(self, rank: int) -> m.HeartbeatMessage | None:
        """Return the rank's last heartbeat, or None if it has sent none."""
        return self._beats[rank]

    def sent(self, message: Any, model: int | None = None) -> None:
        """Record that a message is being sent to a rank. `model`: see Envelope."""
        with self._lock:
            match message:
                case m.Step():
                    # Not overwritten: one rank may have answered before the next rank is sent its part.
                    size = len(message.tokens) * len(message.entries)
                    self._steps.setdefault((model, message.seq), (message.conditioning, size))
                    if len(self._steps) > STEPS_REMEMBERED:
                        del self._steps[next(iter(self._steps))]
                case m.Load():
                    self._forget(model)
                    self._longest = 0.0
                    if message.setup.compile:
                        self._compiling.add(model)
                case m.Unload():
                    self._forget(model)
                case m.DropConditioning():
                    self._largest.pop((model, message.id), None)

    def _forget(self, model: int | None) -> None:
        """Forget a model that will be freed; None: all models."""
        self._compiling = {each for each in self._compiling if model not in (None, each)}
        self._steps = {key: step for key, step in self._steps.items() if model not in (None, key[0])}
        self._largest = {key: size for key, size in self._largest.items() if model not in (None, key[0])}

    def not_sent(self, message: Any, model: int | None = None) -> None:
        """Record that a message passed to `sent` was not sent, so no answer to it will come."""
        with self._lock:
            if isinstance(message, m.Step):
                self._steps.pop((model, message.seq), None)

    def heard(self, rank: int, message: Any, model: int | None = None) -> None:
        """Record that a message came from `rank`. `model`: see Envelope."""
        with self._lock:
            self._silent[rank] = 0.0
            match message:
                case m.HeartbeatMessage():
                    self._beats[rank] = message
                    return
                case m.Ready():
                    self._ready.add(rank)
                case m.Output() if (step := self._steps.get((model, message.seq))) is not None:
                    self._steps[model, message.seq] = None
                    conditioning, size = step
                    self._largest[model, conditioning] = max(size, self._largest.get((model, conditioning), 0))
            self._moved = True

    def tick(self, seconds: float, awaited: Collection[type], blocked: Sequence[bool]) -> Verdict | None:
        """Check whether a rank is silent or stuck, `seconds` after the last check. Returns None if not. `awaited`: reply
        types of open requests. `blocked`: for each rank, whether a thread is sending to it now."""
        with self._lock:
            turned = self.turns != self._turn
            self._turn = self.turns
            return self._silence(seconds, turned, blocked) or (self._stall(seconds, awaited) if turned else None)

    def _silence(self, seconds: float, turned: bool, blocked: Sequence[bool]) -> Verdict | None:
        """Return a verdict on a rank without heartbeats. While the receiving thread is stuck, it hears no rank; then only
        ranks count that do not read a message to its end, or do not finish writing one."""
        for rank, beat in enumerate(self._beats):
            if beat is not None and (turned or blocked[rank] or rank == self.receiving):
                self._silent[rank] += seconds
        longest = max(self._silent)
        if longest < self.silence:
            return None
        rank = self._silent.index(longest)
        text = f"sent no heartbeat for {self.silence:.0f} s{last_seen(self.doing(rank))}."
        cause = f"It was stopped, or memory ran out and the machine swaps. In that case {LESS_MEMORY}"
        return Verdict((rank,), f"{text} {cause}", hung=False)

    def _stall(self, seconds: float, awaited: Collection[type]) -> Verdict | None:
        """Return a verdict on ranks without progress. While one rank makes progress, the others may be waiting for it."""
        if len(self._ready) < len(self._beats):
            return self._late(seconds)
        progress = sum(beat.progress for beat in self._beats if beat is not None)
        deaf = self._deaf()
        busy = {r: beat for r, beat in enumerate(self._beats) if beat is not None and (beat.doing != m.IDLE or r in deaf)}
        steps = [((model, step[0]), step[1]) for (model, _), step in self._steps.items() if step is not None]
        slow = any(reply in SLOW_REPLIES for reply in awaited)
        progressed = self._moved or progress != self._progress
        if progressed and self._in_step and not slow:
            self._longest = max(self._longest, self._stalled)
        self._progress, self._moved, self._in_step = progress, False, bool(steps)
        if progressed or not (busy or awaited or steps):
            self._stalled = 0.0
            return None
        self._stalled += seconds
        new = bool(self._compiling) or slow or any(size > self._largest.get(at, 0) for at, size in steps)
        limit = max(self.first if new else self.stall, self.factor * self._longest)
        if self._stalled < limit:
            return None
        ranks = tuple(rank for rank, beat in busy.items() if not beat.waiting) or tuple(deaf)
        did = "made no progress"
        if not ranks:
            ranks, did = (tuple(busy), "waited for each other") if busy else (self._all, "left a request unanswered")
        text = f"{did} for {limit:.0f} s{last_seen(self.doing(ranks[0]))}.{unanswered(deaf)} {RESTART}"
        return Verdict(ranks, text, hung=True)

    def _deaf(self) -> dict[int, float]:
        """Return the ranks whose device's driver does not answer -> the seconds without an answer."""
        found = {rank: beat.unanswered for rank, beat in enumerate(self._beats) if beat is not None}
        return {rank: seconds for rank, seconds in found.items() if seconds >= UNANSWERED_SECONDS}

    def _late(self, seconds: float) -> Verdict | None:
        """Return a verdict on ranks that do not start."""
        shown = sum(beat is not None for beat in self._beats) + len(self._ready)
        self._starting = 0.0 if shown != self._shown else self._starting + seconds
        self._shown = shown
        if self._starting < self.start:
            return None
        unseen = tuple(rank for rank in self._all if self._beats[rank] is None)
        ranks = unseen or tuple(rank for rank in self._all if rank not in self._ready)
        text = f"did not start within {self.start:.0f} s.{unanswered(self._deaf())} {RESTART}"
        return Verdict(ranks, text, hung=not unseen)
