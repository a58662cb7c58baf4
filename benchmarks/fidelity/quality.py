"""How far PipeFusion is from one rank on the trained mini model, and how far fewer steps would be: the rarer control.

    python -m benchmarks.fidelity.quality --images 400 --out benchmarks/results/quality_NAME_DATE.json
    python -m benchmarks.fidelity.quality --images 400 --steps 20 --bands "" --patches 2,4 --out ...

For each number of steps: the digits read and the PSNR to the exact run (decoded pictures in 0..1, mean over pictures)
of PipeFusion with one warm-up step and M bands, of displaced patches with one warm-up step and of naive patches, and of
one rank with steps dropped to the time predicted for PipeFusion on two stages.
What a band sees depends on M alone, not on the number of stages (tests/system/test_exactness.py), so the pictures are
computed with split_batch to use every core; `--stages 2,4` recomputes some with that many stages and reports the
largest difference. `--cuts 8+8,7+9` has bands of so many of the picture's 16 token rows: even ones meet where digits do.
"""

import math
from itertools import accumulate, pairwise
from unittest import mock

import torch

from benchmarks.harness import mini_model as mini
from benchmarks.harness.mini_model import CHUNK, judge, load, sample
from parallel_backend.client import sampling
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.placement.pipeline_model import StageCost, finish_times

ROWS_OF_TOKEN = 2
"""Latent rows of a token of the mini model."""


def same_time_steps(steps: int, stages: int, bands: int) -> set[int]:
    """Steps that one rank makes in the time predicted for PipeFusion: rounded down, and up in favour of the control."""
    piped = finish_times([True] + [False] * (steps - 1), bands, [StageCost(0.0, 1 / stages)] * stages)[-1]
    return {math.floor(piped), min(steps - 1, math.ceil(piped))}


def band_rows(cut: str) -> tuple[Span, ...]:
    """Latent rows of the bands in "7+9", which counts token rows."""
    edges = accumulate((ROWS_OF_TOKEN * int(part) for part in cut.split("+")), initial=0)
    return tuple(Span(start, stop) for start, stop in pairwise(edges))


def main() -> None:
    parser = mini.parser(__doc__, 400)
    parser.add_argument("--steps", type=mini.numbers(int), default=[20, 8, 4])
    parser.add_argument("--bands", type=mini.numbers(int), default=[2, 4, 8])
    parser.add_argument("--patches", type=mini.numbers(int), default=[])
    parser.add_argument("--stages", type=mini.numbers(int), default=[])
    parser.add_argument("--cuts", type=mini.numbers(str), default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    symbols, noise = mini.requests(options.images)
    report = mini.Report(options)
    model = load(Degrees(batch=2))
    references: dict[int, torch.Tensor] = {}
    pipefusion: dict[tuple[int, int], torch.Tensor] = {}
    for steps in options.steps:
        exact = references[steps] = sample(model, symbols, noise, steps, 0, options.cfg)
        report({"steps": steps, "mode": "one rank", **judge(exact, exact, symbols)})
        for bands in options.bands:
            images = pipefusion[steps, bands] = sample(model, symbols, noise, steps, bands, options.cfg)
            report({"steps": steps, "mode": f"pipefusion M={bands}", **judge(images, exact, symbols)})
        for cut in options.cuts:
            with mock.patch.object(sampling, "cut_rows", return_value=band_rows(cut)):
                images = sample(model, symbols, noise, steps, cut.count("+") + 1, options.cfg)
            report({"steps": steps, "mode": f"pipefusion, bands of {cut} rows", **judge(images, exact, symbols)})
        for fewer in sorted(set().union(*(same_time_steps(steps, 2, bands) for bands in options.bands))):
            images = sample(model, symbols, noise, fewer, 0, options.cfg)
            report({"steps": steps, "mode": f"one rank, {fewer} steps instead", **judge(images, exact, symbols)})
    model.pool.close()
    for degree, mode in [(degree, mode) for degree in options.patches for mode in ("displaced", "naive")]:
        model = load(Degrees(patch=degree, patch_mode=mode))
        for steps, exact in references.items():
            images = sample(model, symbols, noise, steps, 0 if mode == "naive" else 1, options.cfg)
            report({"steps": steps, "mode": f"{mode} patches on {degree} ranks", **judge(images, exact, symbols)})
        model.pool.close()
    for stages in options.stages:
        model = load(Degrees(pipe=stages))
        for (steps, bands), before in pipefusion.items():
            images = sample(model, symbols[:CHUNK], noise[:CHUNK], steps, bands, options.cfg)
            gap = (images - before[:CHUNK]).abs().max().item()
            report({"steps": steps, "mode": f"pipefusion M={bands} on {stages} stages", "max_difference": gap})
        model.pool.close()


if __name__ == "__main__":
    main()
