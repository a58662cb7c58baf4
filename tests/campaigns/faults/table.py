"""Which faults there are: what goes wrong, in which phase, at whose rank, and what must come of it."""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from parallel_backend.core.degrees import Degrees

from .fault import INJECTED, Fault
from .rank import DAMAGED, LOADING_EVENTS, MODEL_FILE

DEGREES = {
    "pipe 2": Degrees(pipe=2),
    "ulysses 2": Degrees(ulysses=2),
    "ring 2": Degrees(ring=2),
    "tensor 2": Degrees(tensor=2),
    "batch 2": Degrees(batch=2),
    "patch 2": Degrees(patch=2, patch_mode="displaced"),
    "pipe 2 x ulysses 2": Degrees(pipe=2, ulysses=2),
    "pipe 2, streamed": Degrees(pipe=2),
    "pipe 2, giving way": Degrees(pipe=2),
}
STREAMED, GIVING_WAY = ", streamed", ", giving way"
"""Endings of degrees of tests/gpu/test_faults.py: weights are streamed, or go to host memory before each prompt."""

EVENTS = {
    "start": 2,
    "rendezvous": 1,
    "loading": LOADING_EVENTS,
    "conditioning": 1,
    "exact": 8,
    "banded": 20,
    "idle": 1,
    "adapt": 10,
    "close run": 1,
    "decoding": 1,
    "unload": 1,
    "closing": 1,
    "giving way": 1,
    "copying": 20,
}
"""Phase -> how many places a fault can strike in, at least, on every rank: blocks run, parameters read, ..."""
COMPUTING = ("exact", "banded")
STREAMING = ("giving way", "copying")
"""Weights go to host memory; a block is being copied from there. On GPUs alone."""
SERVED = ("loading", "conditioning", *COMPUTING, "adapt", "close run", "decoding")
"""A rank handles a message of the client, who waits for what comes of it."""
CANCELLED = ("loading", "conditioning", *COMPUTING, "adapt", "decoding", *STREAMING)
"""The client waits for ranks, and asks meanwhile whether the user has cancelled."""
ANYWHERE = tuple(EVENTS)

ERROR, RIGHT, EITHER = "error", "right", "either"
AT_ONCE, SILENCE, PATIENCE, START = "at once", "silence", "patience", "start"


@dataclass(frozen=True)
class Kind:
    """`says`: by variant, a pattern of what the error must say of the victim. `phases`: where it makes sense.

    `ending`: of the prompt. `within`: what bounds the time from the fault to it. `lives`: the ranks stay.
    """

    says: dict[str, str]
    phases: tuple[str, ...]
    ending: str = ERROR
    within: str = AT_ONCE
    lives: bool = False


_ON = r"\((cpu|cuda)(:\d)?\)"
"""A rank's device."""
_SILENT = rf"rank {{victim}} {_ON}.*(no heartbeat|did not start within)"
_NO_MEMORY = rf"rank {{victim}} {_ON}.*(OutOfMemoryError|can't allocate memory|not enough memory|out of memory)"

KINDS = {
    "killed": Kind({"by itself": rf"rank {{victim}} {_ON} was killed by signal 9"}, ANYWHERE),
    "stopped": Kind({"by itself": _SILENT}, ANYWHERE, within=SILENCE),
    "raises": Kind(
        {"RuntimeError": rf"rank {{victim}} {_ON}.*RuntimeError: {INJECTED}.*Traceback"},
        ("start", "rendezvous", *SERVED, "unload", "closing", *STREAMING),
    ),
    "out of memory": Kind(
        {"torch": _NO_MEMORY, "real": _NO_MEMORY},
        ("loading", "conditioning", *COMPUTING, "adapt", "decoding", *STREAMING),
    ),
    "NaN": Kind({"one value": "not finite"}, COMPUTING, lives=True),
    "slow": Kind({"once": ""}, (*SERVED, "unload", *STREAMING), ending=RIGHT, lives=True),
    "hangs": Kind(
        {"in Python": rf"rank \d {_ON}.*Current thread.* in _hang"}, (*SERVED, "unload", *STREAMING), within=PATIENCE
    ),
    MODEL_FILE: Kind({"cut short": rf"rank \d {_ON}.*(killed by signal 7|{DAMAGED})"}, ("loading",), EITHER),
    "cancelled": Kind({name: "" for name in ("goes on", "unloads")}, CANCELLED, RIGHT, lives=True),
}


def ending(fault: Fault, kind: Kind) -> str:
    return RIGHT if fault.phase == "closing" else kind.ending


def lives(fault: Fault, kind: Kind) -> bool:
    """Whether the ranks stay. Those that are cancelled while they load are ended, since they read no messages meanwhile."""
    return kind.lives and (fault.kind, fault.phase) != ("cancelled", "loading")


def within(fault: Fault, kind: Kind) -> str:
    """What bounds the time to the error. A rank that has sent no heartbeat yet may be importing torch."""
    return START if kind.within == SILENCE and fault.phase in ("start", "rendezvous") else kind.within


def says(fault: Fault, kind: Kind) -> str:
    """Pattern of what the error must say."""
    if fault.kind == "raises" and fault.phase == "start":
        return rf"rank {fault.victim} {_ON} ended with exit code 1"
    return kind.says[fault.variant].format(victim=fault.victim)


def all_places() -> Iterator[tuple[str, str, str, str, int]]:
    """(kind, variant, phase, degrees, victim) of every fault on CPUs; moments are chosen."""
    for name, kind in KINDS.items():
        for variant, phase, (degrees, mesh) in itertools.product(kind.says, kind.phases, DEGREES.items()):
            if phase not in STREAMING and not degrees.endswith((STREAMED, GIVING_WAY)):
                yield from ((name, variant, phase, degrees, victim) for victim in range(mesh.world))


def moments(kind: str, phase: str) -> range:
    if kind == "raises" and phase == "start":
        return range(1, 2)  # before that there is nothing of the rank's own that could
    return range(EVENTS[phase])


def choose(count: int, seed: int, kinds: Iterable[str] = KINDS) -> list[Fault]:
    """`count` faults at random, each kind in each of its phases first; the same for the same seed. In an order that restarts
    few pools: all of two ranks, then all of four."""
    rng, kinds = random.Random(seed), set(kinds)
    places = [place for place in all_places() if place[0] in kinds]
    rng.shuffle(places)
    of_each = {(place[0], place[2]): place for place in reversed(places)}
    chosen = [*of_each.values(), *rng.choices(places, k=max(0, count - len(of_each)))][:count]
    faults = [Fault(*place, moment=rng.choice(moments(place[0], place[2]))) for place in chosen]
    return sorted(faults, key=lambda fault: DEGREES[fault.degrees].world)
