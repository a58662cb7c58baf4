"""Every mode on two ranks of one thread, beside one rank, plain diffusers loops, and the field's own parallel ones."""

import functools
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import measuring
from benchmarks.harness.measuring import Outcome, Outcomes, figure, ratios
from benchmarks.harness.pools import Pools
from benchmarks.harness.subjects import Subject
from benchmarks.rivals.peers import APART, PLAIN, DiffusersRanks, PeerFailed, XditRanks, xdit_version
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from testing import mini
from testing.models import on_ranks

WHAT = "two_ranks"


@dataclass(frozen=True)
class Mode:
    """How our ranks run. `pictures`: at once, in a call's batch. `bands`: see measuring.run_ranks."""

    degrees: Degrees
    pictures: int = 1
    bands: int = 0


OURS = {
    "one rank": Mode(Degrees()),
    "one rank, 2 pictures": Mode(Degrees(), pictures=2),
    "pipefusion M=2": Mode(Degrees(pipe=2), bands=2),
    "pipefusion M=4": Mode(Degrees(pipe=2), bands=4),
    "ulysses": Mode(Degrees(ulysses=2)),
    "ring": Mode(Degrees(ring=2)),
    "tensor": Mode(Degrees(tensor=2)),
    "displaced": Mode(Degrees(patch=2, patch_mode="displaced"), bands=1),
    "naive": Mode(Degrees(patch=2, patch_mode="naive")),
    "split batch": Mode(Degrees(batch=2)),
    "split batch, 2 pictures": Mode(Degrees(batch=2), pictures=2),
}
PLAIN_LOOP, PLAIN_TWICE = "plain loop", "two plain loops"
DIFFUSERS = {"diffusers ulysses": "ulysses", "diffusers ring": "ring"}
XDIT = {
    "xDiT pipefusion M=2": ({"pipe": 2}, 2),
    "xDiT pipefusion M=4": ({"pipe": 2}, 4),
    "xDiT ulysses": ({"ulysses": 2}, 1),
    "xDiT cfg": ({"cfg": 2}, 1),
}
"""Degrees and patches. Its ring attention needs a kernel that returns log-sum-exps, which none of its CPU ones does."""

RIVALS = {
    "pipefusion M=2": ("xDiT pipefusion M=2", "xDiT pipefusion M=4"),
    "pipefusion M=4": ("xDiT pipefusion M=2", "xDiT pipefusion M=4"),
    "ulysses": ("diffusers ulysses", "xDiT ulysses"),
    "ring": ("diffusers ring",),
    "split batch": ("xDiT cfg",),
}
"""Our mode -> the same mode of others."""

EXACT = 1e-4
"""Relative L2 difference of a whole run's sample up to which it is rounding."""


def pictures(name: str) -> int:
    return OURS[name].pictures if name in OURS else 1


def names(subject: Subject) -> list[str]:
    """The cases that this model has: a guided one has a batch of two of its own."""
    guided = subject.cfg > 1
    ours = [name for name in OURS if name != "split batch" or guided]
    ours = [name for name in ours if not (guided and OURS[name].pictures > 1)]
    xdit = [] if guided else list(XDIT)  # its Flux takes no second prompt
    return [PLAIN_LOOP, PLAIN_TWICE, *ours, *DIFFUSERS, *xdit]


class Bench:
    """Processes of all kinds, started when a case first needs them and kept."""

    def __init__(
        self,
        subject: Subject,
        path: Path,
        stack: ExitStack,
        pools: Callable[[int], Pool],
        xdit_python: Path | None,
    ):
        checkpoint = subject.opened(path)

        @functools.cache
        def diffusers() -> DiffusersRanks:
            return stack.enter_context(closing(DiffusersRanks(subject, path)))

        @functools.cache
        def xdit(name: str) -> XditRanks:
            ranks = stack.enter_context(closing(XditRanks(xdit_python, subject, path, *XDIT[name])))
            ranks.run_steps(measuring.REHEARSAL)
            return ranks

        def ours(mode: Mode) -> Outcome:
            model = on_ranks(pools(mode.degrees.world), checkpoint, mode.degrees, "fp32", "auto", lambda: None)
            return measuring.run_ranks(model, subject, mode.pictures, mode.bands)

        self.start_xdit = xdit
        self.cases: dict[str, Callable[[], Outcome]] = {
            PLAIN_LOOP: lambda: diffusers().run(PLAIN),
            PLAIN_TWICE: lambda: diffusers().run(APART),
        }
        self.cases |= {name: functools.partial(ours, mode) for name, mode in OURS.items()}
        self.cases |= {name: lambda mode=mode: diffusers().run(mode) for name, mode in DIFFUSERS.items()}
        self.cases |= {name: lambda name=name: xdit(name).run() for name in XDIT}


def bound(name: str, steps: int) -> float:
    """The most that two ranks can gain. Of PipeFusion's steps one is exact and has one rank at a time at work, unless a
    guided picture's two entries fill the pipeline."""
    warm = 1 / steps
    return 1 / (warm + (1 - warm) / 2) if name.startswith(("pipefusion", "xDiT pipefusion")) else 2.0


def _times(outcomes: Outcomes, slower: str, faster: str, factor: float = 1.0) -> dict:
    return figure(ratios(outcomes[slower], outcomes[faster], factor)) if {slower, faster} <= outcomes.keys() else {}


def row(outcomes: Outcomes, name: str, subject: Subject) -> dict:
    """What is said of a case, with speed-ups for as many pictures over one plain loop and over one rank, round by round.

    Figures over a case that was left out are left out too.
    """
    said, count = measuring.row(outcomes[name], subject.steps), pictures(name)
    base = "one rank" if count == 1 else "one rank, 2 pictures"
    reference = base if base in outcomes else PLAIN_LOOP
    if name not in (PLAIN_LOOP, PLAIN_TWICE) and (over := _times(outcomes, PLAIN_LOOP, name, count)):
        said["speed_up_over_plain_loop"] = over
        if not name.startswith("one rank"):
            limit = bound(name, subject.steps)
            said |= {"bound": round(limit, 3), "share_of_bound": round(over["median"] / limit, 3)}
    if name not in (PLAIN_LOOP, PLAIN_TWICE) and PLAIN_LOOP in outcomes:
        # On a machine that others use too, CPU seconds of the busiest rank say what waiting hides.
        alone, own = (measuring.by_rank(outcomes[each], "cpu_seconds", digits=3) for each in (PLAIN_LOOP, name))
        said["speed_up_by_cpu_seconds"] = round(count * max(alone) / max(own), 3) if max(own) else None
    if name not in (PLAIN_LOOP, PLAIN_TWICE, base) and (over := _times(outcomes, base, name)):
        said["speed_up_over_one_rank"] = over
    if name not in (PLAIN_TWICE, reference) and reference in outcomes:
        sample, expected = outcomes[name][0].sample, outcomes[reference][0].sample
        if sample.shape == expected.shape:
            difference = mini.relative(sample, expected)
            said |= {"relative_difference": float(f"{difference:.2g}"), "exact": difference < EXACT}
    return said


def comparisons(outcomes: Outcomes, subject: Subject) -> dict:
    """What the figures are held against, as speeds over each other."""
    # Two processes run one entry each: of a guided picture's two, or of two pictures.
    split = "split batch" if subject.cfg > 1 else "split batch, 2 pictures"
    found = {
        "one rank over the plain loop (time)": _times(outcomes, "one rank", PLAIN_LOOP),
        "two plain loops, speed of both": _times(outcomes, PLAIN_LOOP, PLAIN_TWICE, 1.0 if subject.cfg > 1 else 2.0),
        "split batch over two plain loops (speed)": _times(outcomes, PLAIN_TWICE, split),
        "pipefusion M=4 over M=2 (speed)": _times(outcomes, "pipefusion M=2", "pipefusion M=4"),
    }
    for ours, rivals in RIVALS.items():
        found |= {f"{ours} over {rival} (speed)": _times(outcomes, rival, ours) for rival in rivals}
    return {name: value for name, value in found.items() if value}


def run(
    subject: Subject,
    rounds: int,
    say: Callable[[str], None],
    xdit_python: Path | None = None,
    only: list[str] | None = None,
    pools: Callable[[int], Pool] | None = None,
) -> dict:
    """The result. `only`: names of cases to run. A peer that cannot run is left out, and `left_out` says why."""
    wanted = [name for name in names(subject) if only is None or name in only]
    left_out: dict[str, str] = {}
    version = None
    with TemporaryDirectory() as directory, ExitStack() as stack:
        path = subject.save(Path(directory))
        subject.for_others(path)
        bench = Bench(subject, path, stack, pools or stack.enter_context(Pools()), xdit_python)
        try:
            version = xdit_version(xdit_python)
        except PeerFailed as error:
            left_out |= {name: str(error) for name in wanted if name in XDIT}
        for name in (name for name in wanted if name in XDIT and name not in left_out):
            say(f"starting {name}")
            try:
                bench.start_xdit(name)
            except PeerFailed as error:
                left_out[name] = str(error)
        for name, why in left_out.items():
            say(f"left out: {name}: {why}")
        outcomes = measuring.interleave({name: bench.cases[name] for name in wanted if name not in left_out}, rounds, say)
        return {
            **measuring.head(f"{WHAT}_{subject.name.lower().replace('-', '')}", subject, rounds),
            "ranks": 2,
            "exact_below": EXACT,
            "xdit": version,
            "left_out": left_out,
            "weights_MB": round(path.stat().st_size / 1e6, 1),
            "comparisons": comparisons(outcomes, subject),
            "cases": {name: row(outcomes, name, subject) for name in outcomes},
        }
