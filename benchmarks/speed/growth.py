"""How cost grows: with tokens, with steps, and with ranks, more of them than there are cores.

The last is told by CPU seconds: where ranks outnumber cores the clock shows the cores, while each rank's CPU seconds show
what it had to do.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import measuring
from benchmarks.harness.measuring import Outcome
from benchmarks.harness.pools import Pools
from benchmarks.harness.subjects import DEEPER_FLUX_LIKE, Subject
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from testing.models import on_ranks

from .two_ranks import Mode

SIDES = (32, 64, 128)
"""Latent pixels: 256, 1,024 and 4,096 tokens."""
STEPS = (4, 12, 25, 50)
RANKS = (1, 2, 4, 8)
GROWTH_STEPS = 4
OVER_TOKENS = {
    "one rank": Mode(Degrees()),
    "pipefusion M=2": Mode(Degrees(pipe=2), bands=2),
    "ulysses": Mode(Degrees(ulysses=2)),
}
BANDS = 2
"""Patches for each stage, where ranks grow."""


def over_ranks(count: int) -> dict[str, Mode]:
    if count == 1:
        return {"one rank": Mode(Degrees())}
    return {
        "pipefusion": Mode(Degrees(pipe=count), bands=min(8, BANDS * count)),
        "ulysses": Mode(Degrees(ulysses=count)),
        "tensor": Mode(Degrees(tensor=count)),
    }


def _point(outcomes: list[Outcome], **at: int) -> dict:
    said = measuring.row(outcomes, 1)
    return at | {name: said[name] for name in ("seconds", "cpu_seconds_by_rank", "peak_MB_by_rank")}


def run(
    rounds: int,
    say: Callable[[str], None],
    subject: Subject = DEEPER_FLUX_LIKE,
    sides: tuple[int, ...] = SIDES,
    steps: tuple[int, ...] = STEPS,
    ranks: tuple[int, ...] = RANKS,
    pools: Callable[[int], Pool] | None = None,
) -> dict:
    """The result: by curve and mode, a list of points."""
    curves: dict[str, dict[str, list[dict]]] = {"tokens": {}, "steps": {}, "ranks": {}}
    with TemporaryDirectory() as directory, ExitStack() as stack:
        checkpoint = subject.opened(subject.save(Path(directory)))

        pools = pools or stack.enter_context(Pools())

        def case(own: Subject, mode: Mode) -> Callable[[], Outcome]:
            def once() -> Outcome:
                degrees = mode.degrees
                model = on_ranks(pools(degrees.world), checkpoint, degrees, "fp32", "auto", lambda: None)
                return measuring.run_ranks(model, own, bands=mode.bands)

            return once

        def measure(curve: str, own: Subject, modes: dict[str, Mode], **at: int) -> None:
            where = " ".join(f"{value} {name}" for name, value in at.items())
            cases = {f"{name}, {where}": case(own, mode) for name, mode in modes.items()}
            outcomes = measuring.interleave(cases, rounds, say)
            for name in modes:
                curves[curve].setdefault(name, []).append(_point(outcomes[f"{name}, {where}"], **at))

        few = min(GROWTH_STEPS, *steps)
        for side in sides:
            own = subject.at(side=side, steps=few)
            measure("tokens", own, OVER_TOKENS, tokens=own.tokens)
        for count in steps:
            measure("steps", subject.at(side=sides[0], steps=count), OVER_TOKENS, steps=count)
        middle = subject.at(side=sides[len(sides) // 2], steps=few)
        for count in ranks:
            measure("ranks", middle, over_ranks(count), ranks=count)
    head = measuring.head("growth", subject, rounds)
    head.pop("steps")
    return head | {
        "over_tokens": f"{few} steps",
        "over_steps": f"{subject.at(side=sides[0]).tokens} tokens",
        "over_ranks": f"{middle.tokens} tokens, {few} steps; {BANDS} patches a stage",
        "curves": curves,
    }
