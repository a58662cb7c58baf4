"""Two ranks against one on a random Flux-like model: PipeFusion, Ulysses and split batch, one CPU thread per rank.

    python benchmarks/scaling.py --rounds 3 --out benchmarks/results/scaling_NAME_DATE.json

Transformer and sampler loop only: no text encoder, no VAE, no loading. Rounds are interleaved (see common.py). Two
bounds stand beside the ratios: PipeFusion's 1/(W/S + (1-W/S)/N), and what the machine leaves of its second core, taken
from two independent processes side by side.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import common  # noqa: E402
from benchmarks.common import Outcome, Outcomes, run_plain_processes, run_ranks  # noqa: E402
from parallel_backend.checkpoint import open_checkpoint  # noqa: E402
from parallel_backend.client import RemoteTransformer  # noqa: E402
from parallel_backend.config import Degrees  # noqa: E402
from parallel_backend.pool import Pool  # noqa: E402


def measure(path: Path, steps: int, rounds: int) -> Outcomes:
    one, two = Pool(("cpu",), threads=1), Pool(("cpu", "cpu"), threads=1)
    checkpoint = open_checkpoint(path)

    def backend(pool: Pool, degrees: Degrees, batch: int = 1, bands: int = 0) -> Callable[[], Outcome]:
        def case() -> Outcome:
            model = RemoteTransformer(pool, checkpoint, degrees, "fp32", "auto", lambda: None)
            return run_ranks(model, steps, batch, bands)

        return case

    cases = {
        "plain diffusers loop": lambda: run_plain_processes(path, steps, 1),
        "two plain loops side by side": lambda: run_plain_processes(path, steps, 2),
        "one rank": backend(one, Degrees()),
        "one rank, batch 2": backend(one, Degrees(), batch=2),
        "pipefusion 2, M=2": backend(two, Degrees(pipe=2), bands=2),
        "pipefusion 2, M=4": backend(two, Degrees(pipe=2), bands=4),
        "ulysses 2": backend(two, Degrees(ulysses=2)),
        "split_batch 2, batch 2": backend(two, Degrees(batch=2), batch=2),
    }
    try:
        return common.interleave(cases, rounds)
    finally:
        one.close()
        two.close()


def summary(outcomes: Outcomes, steps: int) -> dict:
    """Medians, ratios and the bounds they are held against."""

    def ratio(numerator: str, denominator: str) -> float:
        return common.ratio(outcomes[numerator], outcomes[denominator])

    warm = 1 / steps
    bound = 1 / (warm + (1 - warm) / 2)
    speedups = {
        "pipefusion 2, M=2": (ratio("one rank", "pipefusion 2, M=2"), bound),
        "pipefusion 2, M=4": (ratio("one rank", "pipefusion 2, M=4"), bound),
        "ulysses 2": (ratio("one rank", "ulysses 2"), 2.0),
        "split_batch 2, batch 2": (ratio("one rank, batch 2", "split_batch 2, batch 2"), 2.0),
    }
    return {
        **common.head(steps, outcomes),
        "median_seconds": {name: common.median(runs) for name, runs in outcomes.items()},
        "spread_seconds": {name: common.spread(runs) for name, runs in outcomes.items()},
        "one_rank_over_plain_loop": round(ratio("one rank", "plain diffusers loop"), 3),
        "two_independent_processes_speed": round(2 * ratio("plain diffusers loop", "two plain loops side by side"), 3),
        "speed_up": {
            name: {"measured": round(value, 3), "bound": round(limit, 3), "share_of_bound": round(value / limit, 3)}
            for name, (value, limit) in speedups.items()
        },
    }


def main() -> None:
    options = common.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    with common.weights() as path:
        outcomes = measure(path, options.steps, options.rounds)
    common.report(summary(outcomes, options.steps), options.out)


if __name__ == "__main__":
    main()
