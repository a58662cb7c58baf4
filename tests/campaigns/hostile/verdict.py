"""What comes of a file: refused in words, or run on ranks, right or wrong."""

import contextlib
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

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


@dataclass
class Trial:
    """A file at `path`, and what it is run with if it can be loaded."""

    path: Path
    own: OwnClass
    call: ModelCall
    expected: torch.Tensor | None = None
    """What the model gives by other code. None: nothing is known of it."""


@dataclass
class Tally:
    """What came of all cases of a kind. `defects`: by the case's number, what was seen."""

    kind: str
    outcomes: Counter[str] = field(default_factory=Counter)
    defects: dict[int, str] = field(default_factory=dict)

    def note(self, number: int, outcome: str, defect: str = "") -> None:
        self.outcomes[outcome] += 1
        if defect:
            self.defects[number] = defect


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
    try:
        checkpoint = open_own_class(trial.path, trial.own)
    except Exception as error:
        refused(tally, number, error, trial.path)
        return
    pool = ranks.pool(degrees.world)
    try:
        model = on_ranks(pool, checkpoint, degrees, "fp32", "sdpa", lambda: None, own_class=trial.own)
        output = model.predict(trial.call, lambda: None)
    except (RankError, NotFiniteError) as error:
        if pool.error is None and isinstance(error, NotFiniteError):
            tally.note(number, "run, not finite, and named")
        else:
            tally.note(number, "rank ended", str(error)[-800:])
    except Exception as error:
        refused(tally, number, error, trial.path)
    else:
        far = 0.0 if trial.expected is None else relative(output, trial.expected)
        tally.note(number, "run" if trial.expected is None else "run, and right", f"off by {far:.3g}" if far > CLOSE else "")


def refused(tally: Tally, number: int, error: Exception, path: Path) -> None:
    wrong = is_named(error, path)
    where = "".join(traceback.format_exception(error)[-3:])[-600:]
    tally.note(number, "refused", f"{wrong}: {str(error)[:300]!r}\n{where}" if wrong else "")


def run(
    kind: str,
    make: Callable[[random.Random], Trial],
    count: int,
    seed: int,
    ranks: Ranks,
) -> Tally:
    """So many cases of a kind. Each is made from its number and the seed alone. Mostly on one rank."""
    tally = Tally(kind)
    for number in range(count):
        rng = random.Random(f"{seed} {kind} {number}")
        trial, degrees = make(rng), rng.choice((*[Degrees()] * 4, Degrees(pipe=2), Degrees(ulysses=2)))
        judge(tally, number, trial, ranks, degrees)
    return tally


@contextlib.contextmanager
def ranks_of(start: Callable) -> Iterator[Ranks]:
    ranks = Ranks(start)
    try:
        yield ranks
    finally:
        ranks.close()
