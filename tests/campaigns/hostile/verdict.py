"""What comes of a file: refused in words, or run on ranks, right or wrong."""

import contextlib
import random
import re
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.checkpoints.own_class import open_own_class
from parallel_backend.client.call import ModelCall
from parallel_backend.client.not_finite import NotFiniteError
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnClass
from parallel_backend.processes.pool import Pool, RankError
from testing.models import on_ranks
from testing.tiny import relative

MOST_LETTERS = 1500
"""Of an error's text."""
CLOSE = 1e-3
Expected = Callable[[], torch.Tensor | None]
"""What the model gives by other code. None: nothing is known of it."""
Told = Callable[[int, str], None]
"""Hears of each defect as it is found: the case's number and what was seen."""


@dataclass
class Trial:
    """A file at `path`, and what it is run with if it can be loaded."""

    path: Path
    call: ModelCall | None
    expected: Expected = lambda: None
    own: OwnClass | None = None
    """ComfyUI's class that computes it. None: a family."""


@dataclass
class Tally:
    """What came of all cases of a kind. `ended`, `unnamed`, `wrong`, `other`: by the case's number, what was seen."""

    kind: str
    outcomes: Counter[str] = field(default_factory=Counter)
    ended: dict[int, str] = field(default_factory=dict)
    unnamed: dict[int, str] = field(default_factory=dict)
    wrong: dict[int, str] = field(default_factory=dict)
    longest: tuple[int, int] = (0, -1)
    """Letters of the longest error, and the case's number."""
    slowest: tuple[float, int] = (0.0, -1)
    """Seconds of the slowest opening, and the case's number."""
    largest: tuple[int, int] = (0, -1)
    """Bytes that Python took at most for an opening, and the case's number."""

    @property
    def count(self) -> int:
        return sum(self.outcomes.values())

    @property
    def defects(self) -> dict[int, str]:
        return self.ended | self.unnamed | self.wrong

    def __str__(self) -> str:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return (
            f"{self.kind}: {self.count} cases, {outcomes}; longest error {self.longest[0]} letters, slowest opening "
            f"{self.slowest[0]:.2f} s, most memory {self.largest[0] / 1e6:.1f} MB"
        )


class Ranks:
    """Pools of ranks by number, made anew after one has failed. `start`: of thread_ranks."""

    def __init__(self, start: Callable):
        self._start = start
        self._pools: dict[int, Pool] = {}

    def pool(self, world: int) -> Pool:
        known = self._pools.get(world)
        if known is None or known.error is not None:
            if known is not None:
                known.close(politely=False)
            known = self._pools[world] = Pool(("cpu",) * world, start=self._start)
            known.ready.result(60)
        return known

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def is_named(error: BaseException, path: Path) -> str:
    """What is wrong with a refusal, as a word. Empty: nothing."""
    text = str(error)
    shown = re.sub(r"[^ -~]+.*", "", path.name, flags=re.DOTALL)[:60]  # as far as every way to escape it agrees
    if not isinstance(error, ValueError) or not re.match(r"model_name: |\w+_degree ", text):
        return "names no widget"
    if shown not in text:
        return "does not name the file"
    return fault_of(text, str(error.__cause__ or ""))


def fault_of(text: str, cause: str = "") -> str:
    """What is wrong with an error's text, or with its cause's, whatever it says. Empty: nothing."""
    if len(text) > MOST_LETTERS:
        return f"has {len(text)} letters"
    if not text.isprintable():
        return "has signs that act on a terminal"
    if len(cause) > MOST_LETTERS or not cause.isprintable():
        return "is logged with such a cause"
    return ""


def judge(tally: Tally, number: int, trial: Trial, ranks: Ranks, degrees: Degrees) -> None:
    """Opens the file, and runs what can be opened. The tally says what came of it."""
    begun = time.process_time()
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(trial.path) if trial.own is None else open_own_class(trial.path, trial.own)
    except Exception as error:
        note(tally, number, error, trial.path, "refused")
        return
    finally:
        tally.largest = max(tally.largest, (tracemalloc.get_traced_memory()[1], number))
        tracemalloc.stop()
        tally.slowest = max(tally.slowest, (time.process_time() - begun, number))
    pool = ranks.pool(degrees.world)
    try:
        model = on_ranks(pool, checkpoint, degrees, "fp32", "sdpa", lambda: None, own_class=trial.own)
        output = None if trial.call is None else model.predict(trial.call, lambda: None)
    except (RankError, NotFiniteError) as error:
        if pool.error is None and isinstance(error, NotFiniteError):
            tally.outcomes["run, not finite, and named"] += 1
        else:
            tally.outcomes["rank ended"] += 1
            tally.ended[number] = str(error)[-800:]
    except Exception as error:
        note(tally, number, error, trial.path, "refused before loading")
    else:
        expected = trial.expected()
        if expected is None or output is None:
            tally.outcomes["run"] += 1
        elif (far := relative(output, expected)) < CLOSE:
            tally.outcomes["run, and right"] += 1
        else:
            tally.outcomes["run, and wrong"] += 1
            tally.wrong[number] = f"off by {far:.3g}"
    assert pool.error is None or number in tally.ended


def note(tally: Tally, number: int, error: Exception, path: Path, outcome: str) -> None:
    tally.longest = max(tally.longest, (len(str(error)), number))
    if wrong := is_named(error, path):
        tally.outcomes["unnamed"] += 1
        where = "".join(traceback.format_exception(error)[-3:])[-600:]
        tally.unnamed[number] = f"{wrong}: {type(error).__name__}: {str(error)[:300]!r}\n{where}"
    else:
        tally.outcomes[outcome] += 1


def run(
    kind: str,
    make: Callable[[random.Random], Trial],
    count: int,
    seed: int,
    ranks: Ranks,
    degrees: Callable[[random.Random], Degrees],
    told: Told = lambda number, text: None,
    first: int = 0,
) -> Tally:
    """Cases `first` to `first` + `count` of a kind. Each is made from its number and the seed alone."""
    tally = Tally(kind)
    for number in range(first, first + count):
        rng = random.Random(f"{seed} {kind} {number}")
        judge(tally, number, make(rng), ranks, degrees(rng))
        if number in tally.defects:
            told(number, tally.defects[number])
    return tally


@contextlib.contextmanager
def ranks_of(start: Callable) -> Iterator[Ranks]:
    ranks = Ranks(start)
    try:
        yield ranks
    finally:
        ranks.close()
