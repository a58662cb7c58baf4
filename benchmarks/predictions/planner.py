"""What the planner says of every mode at 2 ranks, beside what the mode then takes; and how good its choice is.

    python -m benchmarks.predictions.planner --rounds 2 --out benchmarks/results/planner_NAME_DATE.json
    python -m benchmarks.predictions.planner --only 1024

CPU ranks of one thread over Gloo; transformer and sampler loop only, Euler. In every round the ranks are calibrated, all
modes are planned from that, and then each runs, so that a drifting machine hits all alike; ratios are taken within a round.
`exact` is what `degrees auto` takes without PipeFusion, `pipelined` with it; both are held against the fastest mode that
they may take.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import torch

from benchmarks.harness import measuring
from benchmarks.harness.measuring import Outcome, Outcomes
from benchmarks.harness.subjects import DEEPEST_FLUX_LIKE
from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.planning.calibrated_costs import CalibratedCosts
from parallel_backend.planning.calibration import calibrate
from parallel_backend.planning.modes import Mode
from parallel_backend.planning.planner import Plan, choose, plan
from parallel_backend.planning.workload import workload_of
from parallel_backend.processes.pool import Pool
from testing.models import on_ranks

WORLD = 2
AS_FAST = 1.10
"""A choice within this factor of the fastest counts as good."""
WITHIN = 0.25
"""How far a prediction may be from the measured time."""


@dataclass(frozen=True)
class Problem:
    """A picture of side x side latent pixels, `batch` of them or of prompts."""

    side: int
    batch: int
    steps: int


PROBLEMS = {"1024": Problem(64, 1, 5), "256-batch-2": Problem(32, 2, 6), "1600": Problem(80, 1, 2)}
"""By image tokens."""


class Bench:
    """Ranks for one mode after the other, and alone for one rank."""

    def __init__(self, checkpoint: Checkpoint, stack: ExitStack):
        self.checkpoint = checkpoint
        self.pool, self.single = (stack.enter_context(closing(Pool(("cpu",) * world, threads=1))) for world in (WORLD, 1))

    def measure(self, problem: Problem, mode: Mode) -> Outcome:
        pool = self.pool if mode.device is None else self.single
        model = on_ranks(pool, self.checkpoint, mode.degrees, "fp32", "auto", lambda: None, stage_split="auto")
        bands = 0 if mode.exact else mode.bands
        subject = DEEPEST_FLUX_LIKE.at(side=problem.side, steps=problem.steps)
        return measuring.run_ranks(model, subject, problem.batch, bands)


@dataclass(frozen=True)
class Round:
    """`exact`, `pipelined`: the choices. `seconds`: that calibration and plan took."""

    plan: Plan
    exact: str
    pipelined: str
    seconds: float


def planned(bench: Bench, problem: Problem) -> Round:
    shape, file = (1, 16, problem.side, problem.side), bench.checkpoint
    workload = workload_of(file, "fp32", "cpu", shape, problem.batch, problem.steps, DEEPEST_FLUX_LIKE.text)
    started = time.perf_counter()
    calibration = calibrate(bench.pool, file, "fp32", lambda: None)
    counts = range(1, WORLD + 1)
    found = plan(CalibratedCosts(calibration, workload), counts)
    seconds = time.perf_counter() - started
    unpipelined = plan(CalibratedCosts(calibration, replace(workload, warm_up=problem.steps)), counts)
    return Round(found, str(choose(unpipelined).mode), str(choose(found).mode), seconds)


def run(problem: Problem, rounds: int) -> tuple[list[Round], Outcomes]:
    turns: list[Round] = []
    measured: Outcomes = {}
    with DEEPEST_FLUX_LIKE.saved() as path, ExitStack() as stack:
        bench = Bench(DEEPEST_FLUX_LIKE.opened(path), stack)
        for turn in range(rounds):
            turns.append(planned(bench, problem))
            for found in sorted(turns[-1].plan.predictions, key=lambda each: str(each.mode)):
                if found.mode.bands > 2 * WORLD:
                    continue
                name = str(found.mode)
                measured.setdefault(name, []).append(bench.measure(problem, found.mode))
                row = f"planned {found.seconds:7.2f} s, measured {measured[name][-1].seconds:7.2f} s"
                print(f"round {turn + 1}/{rounds}  {name:34} {row}", flush=True)
    return turns, measured


def choice(names: list[str], measured: Outcomes, allowed: list[str]) -> dict:
    """How much slower each round's choice is than the fastest that it could have been, by medians."""
    fastest = min(allowed, key=lambda name: measuring.median(measured[name]))
    over = [
        measuring.median(measured[name]) / measuring.median(measured[fastest]) if name in measured else None
        for name in names
    ]
    return {
        "chosen": names,
        "fastest": fastest,
        "over_fastest": [None if ratio is None else round(ratio, 3) for ratio in over],
        "all_within_10_percent": all(ratio is not None and ratio <= AS_FAST for ratio in over),
    }


def summary(problem: Problem, turns: list[Round], measured: Outcomes) -> dict:
    modes = {}
    for name, runs in measured.items():
        times = [next(each.seconds for each in turn.plan.predictions if str(each.mode) == name) for turn in turns]
        ratios = [seconds / run.seconds for seconds, run in zip(times, runs, strict=True)]
        modes[name] = {
            "planned_seconds": round(statistics.median(times), 2),
            "median_seconds": measuring.median(runs),
            "spread_seconds": measuring.spread(runs),
            "planned_over_measured": round(statistics.median(ratios), 3),
            "rounds": [round(ratio, 3) for ratio in ratios],
        }
    kinds = {str(each.mode): each.mode for each in turns[0].plan.predictions}
    exact = [name for name in measured if kinds[name].exact]
    pipelined = [name for name in measured if kinds[name].degrees.patch == 1]
    return {
        "image_tokens": (problem.side // 2) ** 2,
        "batch": problem.batch,
        "steps": problem.steps,
        "planner_seconds": round(statistics.median(turn.seconds for turn in turns), 1),
        "within": WITHIN,
        "all_within": all(abs(mode["planned_over_measured"] - 1) <= WITHIN for mode in modes.values()),
        "exact": choice([turn.exact for turn in turns], measured, exact),
        "pipelined": choice([turn.pipelined for turn in turns], measured, pipelined),
        "modes": modes,
    }


def chosen(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(PROBLEMS):
        raise argparse.ArgumentTypeError(f"no problem {', '.join(sorted(unknown))}; there are {', '.join(PROBLEMS)}")
    return names


def measure(description: str, run: Callable[[Problem, int], tuple], summary: Callable[..., dict]) -> None:
    """A benchmark over PROBLEMS, from its options to its result. `run` gives what `summary` takes, outcomes second."""
    parser = measuring.parser(description)
    parser.set_defaults(rounds=2)
    parser.add_argument("--only", type=chosen, default=list(PROBLEMS), help=f"comma list of {', '.join(PROBLEMS)}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: run(PROBLEMS[name], options.rounds) for name in options.only}
    head = measuring.head("predictions", DEEPEST_FLUX_LIKE, options.rounds)
    for key in ("what", "steps", "rounds"):
        head.pop(key)
    problems = {name: summary(PROBLEMS[name], *each) for name, each in found.items()}
    measuring.report({**head, "ranks": WORLD, "rounds": options.rounds, "problems": problems}, options.out)


if __name__ == "__main__":
    measure(__doc__, run, summary)
