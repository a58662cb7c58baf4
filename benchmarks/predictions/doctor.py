"""What Parallel Doctor predicts for every mode at 2 ranks, beside what the mode then takes; and how good its advice is.

    python -m benchmarks.predictions.doctor --rounds 2 --out benchmarks/results/doctor_NAME_DATE.json
    python -m benchmarks.predictions.doctor --only 1024

CPU ranks of one thread over Gloo; transformer and sampler loop only, Euler. In every round the doctor predicts and then
each mode runs, so that a drifting machine hits all alike; ratios are taken within a round. The doctor
knows nothing of this model or machine beforehand: every constant is measured at run time.
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
from parallel_backend.planning.doctor import examine
from parallel_backend.planning.modes import Mode
from parallel_backend.planning.planner import Plan
from parallel_backend.planning.workload import workload_of
from parallel_backend.processes.pool import Pool
from testing import mini
from testing.models import on_ranks

WORLD = 2
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

    def examine(self, problem: Problem) -> tuple[Plan, float]:
        """What the doctor finds, and the seconds it needs."""
        shape = (1, 16, problem.side, problem.side)
        workload = workload_of(self.checkpoint, "fp32", "cpu", shape, problem.batch, problem.steps, DEEPEST_FLUX_LIKE.text)
        workload = replace(workload, trials=mini.trials(DEEPEST_FLUX_LIKE.config))
        started = time.perf_counter()
        found = examine(self.pool, self.checkpoint, workload, "auto", lambda: None, lambda: None)
        return found, time.perf_counter() - started

    def measure(self, problem: Problem, mode: Mode) -> Outcome:
        pool = self.pool if mode.device is None else self.single
        model = on_ranks(pool, self.checkpoint, mode.degrees, "fp32", "auto", lambda: None, stage_split="auto")
        bands = 0 if mode.exact else mode.bands
        subject = DEEPEST_FLUX_LIKE.at(side=problem.side, steps=problem.steps)
        return measuring.run_ranks(model, subject, problem.batch, bands)


Round = tuple[dict[str, float], str, float]
"""Predicted seconds by mode, the advised mode, seconds that the doctor took."""


def run(problem: Problem, rounds: int) -> tuple[list[Round], Outcomes]:
    predicted: list[Round] = []
    measured: Outcomes = {}
    with DEEPEST_FLUX_LIKE.saved() as path, ExitStack() as stack:
        bench = Bench(DEEPEST_FLUX_LIKE.opened(path), stack)
        for turn in range(rounds):
            plan, seconds = bench.examine(problem)
            modes = {str(found.mode): found for found in plan.predictions if 1 <= found.mode.bands <= 2 * WORLD}
            predicted.append(({name: f.seconds for name, f in modes.items()}, str(plan.best.mode), seconds))
            for name, found in sorted(modes.items()):
                measured.setdefault(name, []).append(bench.measure(problem, found.mode))
                row = f"predicted {found.seconds:7.2f} s, measured {measured[name][-1].seconds:7.2f} s"
                print(f"round {turn + 1}/{rounds}  {name:34} {row}", flush=True)
    return predicted, measured


def summary(problem: Problem, predicted: list[Round], measured: Outcomes) -> dict:
    modes = {}
    for name, runs in measured.items():
        ratios = [times[name] / run.seconds for (times, _, _), run in zip(predicted, runs, strict=True)]
        modes[name] = {
            "predicted_seconds": round(statistics.median(times[name] for times, _, _ in predicted), 2),
            "median_seconds": measuring.median(runs),
            "spread_seconds": measuring.spread(runs),
            "predicted_over_measured": round(statistics.median(ratios), 3),
            "rounds": [round(ratio, 3) for ratio in ratios],
        }
    fastest = min(measured, key=lambda name: measuring.median(measured[name]))
    advised = [advice for _, advice, _ in predicted]
    return {
        "image_tokens": (problem.side // 2) ** 2,
        "batch": problem.batch,
        "steps": problem.steps,
        "doctor_seconds": round(statistics.median(seconds for _, _, seconds in predicted), 1),
        "within": WITHIN,
        "all_within": all(abs(mode["predicted_over_measured"] - 1) <= WITHIN for mode in modes.values()),
        "advised": advised,
        "fastest": fastest,
        "advised_over_fastest": [
            round(measuring.median(measured[name]) / measuring.median(measured[fastest]), 3) if name in measured else None
            for name in advised
        ],
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
