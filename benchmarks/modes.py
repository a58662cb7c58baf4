"""Every mode at 2 ranks beside one rank, and diffusers' own context parallelism on the same weights as the baseline.

    python benchmarks/modes.py --rounds 3 --out benchmarks/results/modes_NAME_DATE.json
    python benchmarks/modes.py --only one,ulysses,diffusers-ulysses

CPU ranks of one thread over Gloo, batch 1 unless the name says otherwise; transformer and sampler loop only. Rounds are
interleaved (see common.py). Every case runs the same Euler loop on the same file; what needed adapting in diffusers is
in diffusers_parallel.py. With `--only`, figures over a case that was left out are left out too.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import common  # noqa: E402
from benchmarks.common import Outcome, Outcomes, run_plain_processes, run_ranks  # noqa: E402
from benchmarks.diffusers_parallel import DiffusersRanks  # noqa: E402
from parallel_backend.checkpoint import open_checkpoint  # noqa: E402
from parallel_backend.client import RemoteTransformer  # noqa: E402
from parallel_backend.config import Degrees  # noqa: E402
from parallel_backend.pool import Pool  # noqa: E402
from tests import tiny  # noqa: E402


@dataclass(frozen=True)
class Mode:
    """How our ranks run. `bands`: see common.run_ranks."""

    degrees: Degrees
    batch: int = 1
    bands: int = 0


OURS = {
    "one": Mode(Degrees()),
    "one-batch-2": Mode(Degrees(), batch=2),
    "pipefusion-M2": Mode(Degrees(pipe=2), bands=2),
    "pipefusion-M4": Mode(Degrees(pipe=2), bands=4),
    "ulysses": Mode(Degrees(ulysses=2)),
    "ring": Mode(Degrees(ring=2)),
    "tensor": Mode(Degrees(tensor=2)),
    "displaced": Mode(Degrees(patch=2, patch_mode="displaced"), bands=1),
    "naive": Mode(Degrees(patch=2, patch_mode="naive")),
    "split-batch-2": Mode(Degrees(batch=2), batch=2),
}
FIELD = {"ulysses": "diffusers-ulysses", "ring": "diffusers-ring"}
"""Our mode -> the same mode of diffusers."""

NAMES = ("plain", *OURS, *FIELD.values())
BASELINE = dict.fromkeys(NAMES, "one") | {"split-batch-2": "one-batch-2"}
EXACT = 1e-4
"""Relative L2 difference of a whole run's sample up to which it is rounding."""


def measure(path: Path, steps: int, rounds: int, names: list[str]) -> Outcomes:
    checkpoint = open_checkpoint(path)
    with ExitStack() as stack:

        @functools.cache
        def pool(world: int) -> Pool:
            return stack.enter_context(closing(Pool(("cpu",) * world, threads=1)))

        @functools.cache
        def diffusers_ranks() -> DiffusersRanks:
            return stack.enter_context(closing(DiffusersRanks(path)))

        def ours(mode: Mode) -> Outcome:
            ranks = pool(mode.degrees.world)
            model = RemoteTransformer(ranks, checkpoint, mode.degrees, "fp32", "auto", lambda: None)
            return run_ranks(model, steps, mode.batch, mode.bands)

        def diffusers(mode: str) -> Outcome:
            return diffusers_ranks().run(mode, steps)

        cases: dict[str, Callable[[], Outcome]] = {"plain": lambda: run_plain_processes(path, steps, 1)}
        cases |= {name: functools.partial(ours, mode) for name, mode in OURS.items()}
        cases |= {name: functools.partial(diffusers, mode) for mode, name in FIELD.items()}
        return common.interleave({name: cases[name] for name in names}, rounds)


def against_one_rank(outcomes: Outcomes, name: str) -> dict:
    """Speed, and how far the sample is from one rank's."""
    if BASELINE[name] == name or BASELINE[name] not in outcomes or name == "one-batch-2":
        return {}
    one = outcomes[BASELINE[name]]
    difference = tiny.relative(outcomes[name][0].sample, one[0].sample)
    return {
        "speed_up": round(common.ratio(one, outcomes[name]), 3),
        "exact": difference < EXACT,
        "relative_difference": float(f"{difference:.2g}"),
    }


def costs(outcome: Outcome, steps: int, file_bytes: int) -> dict:
    """What left the ranks, by mesh axis, and the rank that holds most weights. Nobody counts what diffusers moves."""
    row = {}
    if outcome.stats:
        axes = sorted({axis for rank in outcome.stats for axis in rank.bytes_sent})
        moved = {axis: sum(rank.bytes_sent.get(axis, 0) for rank in outcome.stats) for axis in axes}
        row["megabytes_per_step"] = {axis: round(count / steps / 1e6, 3) for axis, count in moved.items()}
    if outcome.weight_bytes:
        row["largest_weight_share"] = round(max(outcome.weight_bytes) / file_bytes, 3)
    return row


def against_diffusers(outcomes: Outcomes, name: str) -> dict:
    """Our time over diffusers' in the same mode. `why_not`, where ours is slower: what of it the ranks spent waiting."""
    if FIELD.get(name) not in outcomes:
        return {}
    ours, theirs = outcomes[name], outcomes[FIELD[name]]
    median = common.ratio(ours, theirs)
    row = {
        "time_over_diffusers": {
            "median": round(median, 3),
            "rounds": [round(ratio, 3) for ratio in common.ratios(ours, theirs)],
        }
    }
    if median > 1:
        waited = max(rank.wait_seconds for outcome in ours for rank in outcome.stats)
        row["why_not"] = f"slower by {median - 1:.1%}; of {common.median(ours)} s a rank waited {waited:.2f} s at most"
    return row


def summary(outcomes: Outcomes, steps: int, file_bytes: int) -> dict:
    return {
        **common.head(steps, outcomes),
        "ranks": 2,
        "exact_below": EXACT,
        "modes": {
            name: {
                "median_seconds": common.median(runs),
                "spread_seconds": common.spread(runs),
                **against_one_rank(outcomes, name),
                **costs(runs[0], steps, file_bytes),
                **against_diffusers(outcomes, name),
            }
            for name, runs in outcomes.items()
        },
    }


def chosen(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(NAMES):
        raise argparse.ArgumentTypeError(f"no case {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    return names


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", type=chosen, default=list(NAMES), help=f"comma list of {', '.join(NAMES)}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with common.weights() as path:
        outcomes = measure(path, options.steps, options.rounds, options.only)
        result = summary(outcomes, options.steps, path.stat().st_size)
    common.report(result, options.out)


if __name__ == "__main__":
    main()
