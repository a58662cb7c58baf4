"""Two ranks of which the second is half as fast (simulated): an even cut against one by measured speed.

    python -m benchmarks.speed.balance --rounds 3 --out benchmarks/results/balance_NAME_DATE.json

PipeFusion cuts the blocks unevenly, displaced patch the picture. Transformer and sampler loop only, so without the
measurement at loading. Rounds are interleaved (see harness/measuring.py). The ceiling of the gain is that of work cut to any
fraction at no cost; whole blocks, warm-up steps and text stay below it.
"""

from collections.abc import Callable
from contextlib import closing

import torch

from benchmarks.harness import measuring
from benchmarks.harness.measuring import Outcome, Outcomes
from benchmarks.harness.subjects import DEEPEST_FLUX_LIKE, Subject
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from testing.models import on_ranks
from testing.slow_rank import start_with

SLOWDOWN = (1.0, 2.0)
MODES = {"pipefusion": (Degrees(pipe=2), 4), "displaced": (Degrees(patch=2, patch_mode="displaced"), 1)}
"""Degrees and bands (see measuring.run_ranks)."""

SPLITS = ("even", "auto")

Cuts = dict[str, list[dict]]
"""By case, the cut of each round: `auto` measures at each loading and need not choose the same."""


def case_name(mode: str, split: str) -> str:
    return f"{mode} {split}"


def measure(subject: Subject, rounds: int) -> tuple[Outcomes, Cuts]:
    cuts: Cuts = {case_name(mode, split): [] for mode in MODES for split in SPLITS}
    with subject.saved() as folder, closing(Pool(("cpu", "cpu"), threads=1, start=start_with(SLOWDOWN))) as pool:
        checkpoint = subject.opened(folder)

        def case(mode: str, split: str) -> Callable[[], Outcome]:
            def run() -> Outcome:
                degrees, bands = MODES[mode]
                model = on_ranks(pool, checkpoint, degrees, "fp32", "auto", lambda: None, stage_split=split)
                cuts[case_name(mode, split)].append(
                    {
                        "blocks": [len(span) for span in model.balance.stage_blocks],
                        "patch_shares": [round(share, 3) for share in model.balance.patch_shares],
                    }
                )
                return measuring.run_ranks(model, subject, bands=bands)

            return run

        cases = {case_name(mode, split): case(mode, split) for mode in MODES for split in SPLITS}
        return measuring.interleave(cases, rounds, measuring.TimedLog()), cuts


def summary(subject: Subject, rounds: int, outcomes: Outcomes, cuts: Cuts) -> dict:
    """Medians, the cuts, and the time of the even cut over that of the measured one."""
    return {
        **measuring.head("balance", subject, rounds),
        "slowdown": SLOWDOWN,
        "bands": {mode: bands for mode, (_, bands) in MODES.items()},
        "median_seconds": {name: measuring.median(runs) for name, runs in outcomes.items()},
        "spread_seconds": {name: measuring.spread(runs) for name, runs in outcomes.items()},
        "cuts": cuts,
        "even_over_auto": {
            mode: measuring.figure(measuring.ratios(*(outcomes[case_name(mode, split)] for split in SPLITS)))["median"]
            for mode in MODES
        },
        "even_over_auto_ceiling": max(SLOWDOWN) * sum(1 / slowdown for slowdown in SLOWDOWN) / len(SLOWDOWN),
    }


def main() -> None:
    options = measuring.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    subject = DEEPEST_FLUX_LIKE.at(steps=options.steps)
    measuring.report(summary(subject, options.rounds, *measure(subject, options.rounds)), options.out)


if __name__ == "__main__":
    main()
