"""Which faults there are: what goes wrong, in which phase, at whose rank, and what must come of it."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from parallel_backend.core.degrees import Degrees

from .fault import INJECTED, Fault
from .rank import LOADING_EVENTS

DEGREES = {
    "pipe 2": Degrees(pipe=2),
    "ulysses 2": Degrees(ulysses=2),
    "ring 2": Degrees(ring=2),
    "tensor 2": Degrees(tensor=2),
    "batch 2": Degrees(batch=2),
    "patch 2": Degrees(patch=2, patch_mode="displaced"),
    "pipe 2 x ulysses 2": Degrees(pipe=2, ulysses=2),
    "pipe 2, streamed": Degrees(pipe=2),
    "ulysses 2, streamed": Degrees(ulysses=2),
    "pipe 2, giving way": Degrees(pipe=2),
    "ulysses 2, giving way": Degrees(ulysses=2),
}
STREAMED, GIVING_WAY = ", streamed", ", giving way"
"""Endings of degrees whose ranks have emulated devices: weights are streamed, or go to host memory before each prompt."""

EVENTS = {
    "start": 2,
    "rendezvous": 2,
    "loading": LOADING_EVENTS,
    "probe": 2,
    "conditioning": 1,
    "exact": 8,
    "banded": 20,
    "sending": 3,
    "idle": 1,
    "adapt": 10,
    "close run": 1,
    "decoding": 15,
    "unload": 1,
    "closing": 1,
    "giving way": 1,
    "copying": 20,
}
"""Phase -> how many places a fault can strike in, at least, on every rank: blocks run, parameters read, ..."""
TRANSFERS = 3
"""Of an exact call and of a banded one, on every rank that has any."""

MODEL_FILE = "damaged.safetensors"
"""Of the faults that need one to damage."""

COMPUTING = ("exact", "banded")
STREAMING = ("giving way", "copying")
"""Weights go to host memory; a block is being copied from there."""
SERVED = ("loading", "probe", "conditioning", *COMPUTING, "adapt", "close run", "decoding")
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
    `by_client`: the client's process does it, at the moment at which the victim is there.
    """

    says: dict[str, str]
    phases: tuple[str, ...]
    ending: str = ERROR
    within: str = AT_ONCE
    lives: bool = False
    by_client: bool = False


_ON = r"\((cpu|cuda)(:\d)?\)"
"""A rank's device."""
_NO_MESSAGE = rf"rank {{victim}} {_ON}.*(BadMessage|sent what cannot be|closed its .*connection)"
_LOST = rf"rank {{victim}} {_ON}.*(exit code|closed its .*connection|BrokenPipe|BadMessage)"
_SILENT = rf"rank {{victim}} {_ON}.*(no sign of life|did not start within)"
_STANDS_STILL = rf"rank \d {_ON}"

KINDS = {
    "killed": Kind(
        {name: rf"rank {{victim}} {_ON} was killed by signal 9" for name in ("by itself", "from outside")}, ANYWHERE
    ),
    "stopped": Kind({name: _SILENT for name in ("by itself", "from outside")}, ANYWHERE, within=SILENCE),
    "raises": Kind(
        {"RuntimeError": rf"rank {{victim}} {_ON}.*RuntimeError: {INJECTED}.*Traceback"},
        ("start", "rendezvous", *SERVED, "unload", "closing", *STREAMING),
    ),
    "transfer fails": Kind({"RuntimeError": rf"rank \d {_ON}.*{INJECTED}"}, COMPUTING),
    "out of memory": Kind(
        {
            "torch": rf"rank {{victim}} {_ON}.*OutOfMemoryError",
            "real": rf"rank {{victim}} {_ON}.*(can't allocate memory|not enough memory|out of memory)",
            "Python": rf"rank {{victim}} {_ON}.*MemoryError",
        },
        ("loading", "probe", "conditioning", *COMPUTING, "adapt", "decoding", *STREAMING),
    ),
    "NaN": Kind({"one value": rf"rank {{victim}} {_ON}"}, COMPUTING, lives=True),
    "slow": Kind({"once": "", "for long": ""}, (*SERVED, "unload", *STREAMING), ending=RIGHT, lives=True),
    "hangs": Kind({"in Python": _STANDS_STILL}, (*SERVED, "unload", *STREAMING), within=PATIENCE),
    "transfer lost": Kind({"not sent": _STANDS_STILL}, COMPUTING, within=PATIENCE),
    "exits": Kind(
        {
            "os._exit(3)": rf"rank {{victim}} {_ON} ended with exit code 3",
            "os._exit(0)": rf"rank {{victim}} {_ON} ended with exit code 0",
            "sys.exit(3)": rf"rank {{victim}} {_ON}.*(SystemExit: 3|exit code 3)",
        },
        ANYWHERE,
    ),
    "crashes": Kind(
        {
            "segfault": rf"rank {{victim}} {_ON} was killed by signal 11",
            "abort": rf"rank {{victim}} {_ON} was killed by signal 6",
        },
        ANYWHERE,
    ),
    "cut off": Kind(
        {"rank's end": _LOST, "rank says nothing more": _LOST},
        ("rendezvous", "loading", "conditioning", *COMPUTING, "idle", "adapt", "close run", "decoding"),
    ),
    "client's end cut off": Kind(
        {"both ways": _LOST}, ("loading", "conditioning", *COMPUTING, "idle", "adapt", "close run"), by_client=True
    ),
    "garbage from a rank": Kind(
        {name: _NO_MESSAGE for name in ("bytes", "nonsense", "length", "tensor", "another rank")}
        | {"cut short": f"{_NO_MESSAGE}|{_SILENT}"},  # what comes next is taken for the rest of it, and may be too little
        ("loading", *COMPUTING, "idle", "decoding"),
    ),
    "output of the wrong shape": Kind({"one value": _NO_MESSAGE}, COMPUTING),
    "output nobody asked for": Kind({"of long ago": ""}, (*COMPUTING, "idle", "decoding"), ending=RIGHT, lives=True),
    "garbage to a rank": Kind(
        {name: _LOST for name in ("bytes", "nonsense", "length", "unknown message")},
        ("loading", *COMPUTING, "idle"),
        by_client=True,
    ),
    "model file": Kind({name: rf"model_name: {MODEL_FILE}" for name in ("gone", "cut short")}, ("loading",), by_client=True),
    "model file while it is read": Kind(
        {"cut short": rf"rank \d {_ON}.*(killed by signal 7|{MODEL_FILE})"}, ("loading",), EITHER, by_client=True
    ),
    "cancelled": Kind({name: "" for name in ("goes on", "unloads")}, CANCELLED, RIGHT, lives=True),
    "no host memory": Kind({"none is free": "", "refused": ""}, ("giving way",), RIGHT, lives=True),
    "model file while it is streamed": Kind(
        {name: rf"rank {{victim}} {_ON}.*{MODEL_FILE} has changed on disk" for name in ("gone", "cut short", "replaced")},
        ("giving way",),
        by_client=True,
    ),
    "store file": Kind({name: rf"rank \d {_ON}" for name in ("gone", "damaged")}, ("rendezvous",), EITHER, START),
}


def ending(fault: Fault, kind: Kind) -> str:
    return RIGHT if fault.phase == "closing" else kind.ending


def lives(fault: Fault, kind: Kind) -> bool:
    """Whether the ranks stay. Those that are cancelled while they load are ended, since they read no messages meanwhile."""
    return kind.lives and (fault.kind, fault.phase) != ("cancelled", "loading")


def within(fault: Fault, kind: Kind) -> str:
    """What bounds the time to the error. A rank that has given no sign of life yet may be importing torch."""
    return START if kind.within == SILENCE and fault.phase in ("start", "rendezvous") else kind.within


def says(fault: Fault, kind: Kind) -> str:
    """Pattern of what the error must say."""
    if fault.kind == "raises" and fault.phase == "start":
        return rf"rank {fault.victim} {_ON} ended with exit code 1"
    return kind.says[fault.variant].format(victim=fault.victim)


def makes_sense(kind: str, variant: str, phase: str, degrees: str, victim: int) -> bool:
    """Whether this rank can be struck so in this phase."""
    mesh = DEGREES[degrees]
    at = mesh.coordinate(victim)
    sends_outputs = at.pipe == mesh.pipe - 1 and at.tensor == 0
    if degrees.endswith(STREAMED) != (phase == "copying") or degrees.endswith(GIVING_WAY) != (phase == "giving way"):
        return False
    if kind == "model file while it is streamed" and mesh.sequence > 1:
        return False  # what the victim has no memory for, its neighbour has
    if phase == "probe" and mesh.pipe == mesh.patch == 1:
        return False  # nothing to divide: nothing is measured
    if (phase == "sending" or kind == "output of the wrong shape") and not sends_outputs:
        return False
    if phase == "sending" and variant == "from outside":
        return False  # it would hit whatever comes next
    if phase == "idle" and variant == "sys.exit(3)":
        return False  # raised in the thread that waits for messages, or nowhere
    if phase == "closing" and kind == "cut off":
        return False
    return not (kind.startswith("transfer") and mesh.batch > 1)  # replicas have no transfers


def all_places() -> Iterator[tuple[str, str, str, str, int]]:
    """(kind, variant, phase, degrees, victim) of every fault that makes sense; moments are chosen."""
    for name, kind in KINDS.items():
        for variant in kind.says:
            for phase in kind.phases:
                for degrees, mesh in DEGREES.items():
                    for victim in range(mesh.world):
                        if makes_sense(name, variant, phase, degrees, victim):
                            yield name, variant, phase, degrees, victim


def moments(kind: str, phase: str) -> range:
    if kind == "raises" and phase == "start":
        return range(1, 2)  # before that there is nothing of the rank's own that could
    if kind.startswith("transfer"):
        return range(TRANSFERS)
    if kind == "cut off" and phase == "rendezvous":
        return range(1)
    return range(EVENTS[phase])


def choose(count: int, seed: int, kinds: Iterable[str] = KINDS) -> list[Fault]:
    """`count` faults: each kind in each of its phases, then each variant, then at random; the same for the same seed.

    An eighth have four ranks. In an order that restarts few pools: all of two ranks, then all of four.
    """
    rng, kinds = random.Random(seed), set(kinds)
    places = [place for place in all_places() if place[0] in kinds]
    rng.shuffle(places)
    two = [place for place in places if DEGREES[place[3]].world == 2]
    four = [place for place in places if DEGREES[place[3]].world == 4]
    chosen: list[tuple[str, str, str, str, int]] = []
    for key in (lambda place: (place[0], place[2]), lambda place: place[:2]):
        seen = {key(place) for place in chosen}
        for place in two:
            if key(place) not in seen:
                seen.add(key(place))
                chosen.append(place)
    chosen, large = chosen[:count], count // 8
    while len(chosen) < count:
        among = four if count - len(chosen) <= large else two
        kind, phase = rng.choice(sorted({(place[0], place[2]) for place in among}))
        chosen.append(rng.choice([place for place in among if (place[0], place[2]) == (kind, phase)]))
    faults = [Fault(*place, moment=rng.choice(moments(place[0], place[2])), seed=rng.randrange(1 << 30)) for place in chosen]
    return sorted(faults, key=lambda fault: DEGREES[fault.degrees].world)
