"""What comes of a file: refused in words, or run on ranks, right or wrong."""

import contextlib
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel_backend.checkpoints.checkpoint import open_own_class
from parallel_backend.client.call import ModelCall
from parallel_backend.client.not_finite import NotFiniteError
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnClass
from testing.mini import relative
from testing.models import on_ranks
from testing.thread_ranks import thread_ranks
from tests.support.planted_comfyui import planted_comfyui
from tests.support.pools import Pools

from .runner import Case, Make

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


@contextlib.contextmanager
def on_threads(kind: Callable[[Path], Callable[[random.Random], Trial]]) -> Iterator[Make]:
    """Files that are opened here, and run on rank threads, mostly on one."""
    with tempfile.TemporaryDirectory() as folder, planted_comfyui(), thread_ranks() as start:
        made, pools = kind(Path(folder)), Pools(start)

        def make(rng: random.Random) -> Case:
            trial, degrees = made(rng), rng.choice((*[Degrees()] * 4, Degrees(pipe=2), Degrees(ulysses=2)))
            return lambda: judge(trial, pools, degrees)

        yield make
        pools.close()


def judge(trial: Trial, pools: Pools, degrees: Degrees) -> str:
    """Opens the file, and runs what can be opened. What came of it. AssertionError for an error that does not say what
    belongs to it, RankError for ranks that ended."""
    try:
        checkpoint = open_own_class(trial.path, trial.own)
        model = on_ranks(pools(degrees.world), checkpoint, degrees, "fp32", "sdpa", lambda: None, own_class=trial.own)
    except ValueError as error:
        check(error, rf"(model_name: |\w+_degree ).*{re.escape(shown(trial.path))}")
        return "refused"
    try:
        output = model.predict(trial.call, lambda: None)
    except NotFiniteError:
        assert pools(degrees.world) is model.pool, "the ranks ended"
        return "run, not finite, and named"
    if trial.expected is None:
        return "run"
    assert (far := relative(output, trial.expected)) < CLOSE, f"off by {far:.3g}"
    return "run, and right"


def shown(path: Path) -> str:
    """A file's name, as far as every way to escape it agrees."""
    return re.sub(r"[^ -~]+.*", "", path.name, flags=re.DOTALL)[:60]


def check(error: BaseException, pattern: str) -> None:
    """AssertionError if its text, or its cause's, is not as users and logs need it."""
    assert re.match(pattern, str(error)), f"names no widget or file: {str(error)[:300]!r}"
    for text in (str(error), str(error.__cause__ or "")):
        assert len(text) <= MOST_LETTERS, f"has {len(text)} letters"
        assert text.isprintable(), f"has signs that act on a terminal: {text[:300]!r}"
