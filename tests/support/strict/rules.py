"""How strict the transport is, and what it says where code breaks one of NCCL's rules."""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[3]
SUPPORT = tuple(str(Path(__file__).parents[1] / folder) for folder in ("strict", "emulated_gpu"))
TRIAL = "parallel_backend/rank/comm/self_test.py"
"""In the place of a call of the self-test, which has a time limit and comes before weights."""
SHORT = 4096
"""Bytes of the longest sum that counts as a short one: NCCL takes its algorithm by the size, here one of two."""
COUNTING = "parallel_backend/rank/comm/transfers.py"
"""Every transfer goes through it, so that it says nothing of a place."""
CALLERS = 3
"""Places in the repository's own code that a place names: the transfer, and who wanted it."""

KNOWN = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
}
"""What every NCCL of the torch versions that are supported can send."""

ISSUE, ANY = "issue", "any"
"""Which operation gets a free place: the one that was issued first on the rank, or whichever comes first by its delay."""


class RuleBroken(AssertionError):
    """On NCCL this would hang or give wrong values, if not now then with other timing."""


class Deadlock(RuleBroken):
    """Nothing has moved for `Rules.patience` seconds."""


@dataclass(frozen=True)
class Rules:
    """`places`: operations of different communicators that a rank runs at a time, K. `launch`: ISSUE or ANY.

    `delay`: the longest, in seconds, between a call and its start; most are far shorter, by `seed`, communicator and rank.
    `patience`: of a deadlock. `store_seconds`: how long the first operation of a communicator waits for the others.
    `trials`: what NCCL connects for, an operation's kind with each pair and direction, has to come first in a trial.
    """

    places: int = 8
    launch: str = ANY
    seed: int = 0
    delay: float = 0.002
    patience: float = 30.0
    store_seconds: float = 30.0
    trials: bool = False

    def pause(self, rank: int, communicator: str, number: int) -> float:
        """Seconds of delay of the rank's operation of this number. The same for the same seed, whatever the timing.

        One in three of a rank's communicators is as slow as can be, one ten times as fast, and one at once.
        """
        scale = (0.0, 0.1, 1.0)[random.Random(f"{self.seed} {rank} {communicator}").randrange(3)]
        return self.delay * scale * random.Random(f"{self.seed} {rank} {communicator} {number}").random() ** 2


def place() -> str:
    """Where in the repository's code the call under way comes from: file:line, innermost first."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < CALLERS:
        file = frame.f_code.co_filename
        if file.startswith(str(ROOT)) and not file.startswith(SUPPORT) and "site-packages" not in file:
            here = f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}"
            if not here.startswith(COUNTING) and here not in found:
                found.append(here)
        frame = frame.f_back
    return " < ".join(found)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view [nbytes] uint8."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def poison(tensor: torch.Tensor) -> None:
    """Fill with bytes of ones: NaN in every floating dtype, -1 or the largest value in integers."""
    with torch.inference_mode():
        as_bytes(tensor).fill_(255)


def is_poisoned(tensor: torch.Tensor) -> bool:
    return bool((as_bytes(tensor) == 255).all())
