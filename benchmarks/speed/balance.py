"""Two ranks of which the second is half as fast (simulated): an even cut against one by measured speed.

    python benchmarks/speed/balance.py --rounds 3 --out benchmarks/results/balance_NAME_DATE.json

PipeFusion cuts the blocks unevenly, displaced patch the picture. Transformer and sampler loop only, so without the
measurement at loading. Rounds are interleaved (see common.py). The ceiling of the gain is that of work cut to any
fraction at no cost; whole blocks, warm-up steps and text stay below it.
"""

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import common  # noqa: E402
from benchmarks.common import Outcome, Outcomes, run_ranks  # noqa: E402
from parallel_backend.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from parallel_backend.client.remote_transformer import RemoteTransformer  # noqa: E402
from parallel_backend.core.degrees import Degrees  # noqa: E402
from parallel_backend.processes.pool import Pool  # noqa: E402

SLOWDOWN = (1.0, 2.0)
MODES = {"pipefusion": (Degrees(pipe=2), 4), "displaced": (Degrees(patch=2, patch_mode="displaced"), 1)}
"""Degrees and bands (see common.run_ranks)."""

SPLITS = ("even", "auto")

Cuts = dict[str, list[dict]]
"""By case, the cut of each round: `auto` measures at each loading and need not choose the same."""


def case_name(mode: str, split: str) -> str:
    return f"{mode} {split}"


def measure(path: Path, steps: int, rounds: int) -> tuple[Outcomes, Cuts]:
    checkpoint = open_checkpoint(path)
    cuts: Cuts = {case_name(mode, split): [] for mode in MODES for split in SPLITS}
    with closing(Pool(("cpu", "cpu"), threads=1, slowdown=SLOWDOWN)) as pool:

        def case(mode: str, split: str) -> Callable[[], Outcome]:
            def run() -> Outcome:
                degrees, bands = MODES[mode]
                model = RemoteTransformer(pool, checkpoint, degrees, "fp32", "auto", lambda: None, stage_split=split)
                cuts[case_name(mode, split)].append(
                    {
                        "blocks": [len(span) for span in model.stage_blocks],
                        "patch_shares": [round(share, 3) for share in model.patch_shares],
                    }
                )
                return run_ranks(model, steps, bands=bands)

            return run

        cases = {case_name(mode, split): case(mode, split) for mode in MODES for split in SPLITS}
        return common.interleave(cases, rounds), cuts


def summary(outcomes: Outcomes, cuts: Cuts, steps: int) -> dict:
    """Medians, the cuts, and the time of the even cut over that of the measured one."""
    return {
        **common.head(steps, outcomes),
        "slowdown": SLOWDOWN,
        "bands": {mode: bands for mode, (_, bands) in MODES.items()},
        "median_seconds": {name: common.median(runs) for name, runs in outcomes.items()},
        "spread_seconds": {name: common.spread(runs) for name, runs in outcomes.items()},
        "cuts": cuts,
        "even_over_auto": {
            mode: round(common.ratio(*(outcomes[case_name(mode, split)] for split in SPLITS)), 3) for mode in MODES
        },
        "even_over_auto_ceiling": max(SLOWDOWN) * sum(1 / slowdown for slowdown in SLOWDOWN) / len(SLOWDOWN),
    }


def main() -> None:
    options = common.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    with common.weights() as path:
        outcomes, cuts = measure(path, options.steps, options.rounds)
    common.report(summary(outcomes, cuts, options.steps), options.out)


if __name__ == "__main__":
    main()
