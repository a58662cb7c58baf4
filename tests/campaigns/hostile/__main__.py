"""The command: all kinds of files, counted by what came of them."""

import contextlib
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from parallel_backend.core.degrees import Degrees
from testing.thread_ranks import thread_ranks
from tests.campaigns.fuzz.runner import Case, Kinds, Make, command
from tests.support.planted_comfyui import planted_comfyui
from tests.support.pools import Pools

from . import files
from .verdict import Trial, judge


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


KINDS: Kinds = {
    "own classes": (0.55, lambda: on_threads(files.own_classes)),
    "quantised": (0.35, lambda: on_threads(files.packed)),
    "GGUF": (0.1, lambda: on_threads(files.ggufs)),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(command("python -m tests.campaigns.hostile", "hostile files: a named error, or a right picture", KINDS))
