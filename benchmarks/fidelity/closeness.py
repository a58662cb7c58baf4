"""How well `min_closeness` of Apply PipeFusion keeps its word, on the trained mini model.

    python -m benchmarks.fidelity.closeness --images 10 --out benchmarks/results/closeness_mini_2cores_DATE.json

Pictures by ComfyUI's samplers on two stages, one warm-up step. For each case: the closeness that was asked for, the true
one in dB of the latent (20 log10(standard deviation / RMS error)), the true less the expected one (each the least, the mean
and the largest over pictures), the PSNR of the pictures, and the mean number of exact model calls. `missed`:
pictures below what was asked for. The control is one rank with fewer steps, in the predicted time of two stages.
"""

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.fidelity.quality import same_time_steps
from benchmarks.harness import mini_model as mini
from benchmarks.harness.comfyui_pictures import studio

CASES = ("euler", "simple"), ("euler", "beta"), ("heun", "simple"), ("dpmpp_2m", "simple"), ("uni_pc", "simple")
CASES += ("euler_ancestral", "simple"), ("dpmpp_2m_sde", "simple")
STAGES = 2


def decibels(latents: torch.Tensor, exact: torch.Tensor) -> list[float]:
    """The closeness of each latent [N, C, H, W], at most 120."""
    error, spread = (latents - exact).flatten(1).square().mean(1).sqrt(), exact.flatten(1).std(1)
    return (20 * (spread / error.clamp_min(1e-6 * spread)).log10()).tolist()


def main() -> None:
    parser = mini.parser(__doc__, 10)
    parser.add_argument("--steps", type=mini.numbers(int), default=[20, 8, 4])
    parser.add_argument("--bands", type=mini.numbers(int), default=[2, 4])
    parser.add_argument("--asked", type=mini.numbers(float), default=[0.0, 20.0, 30.0, 40.0])
    parser.add_argument("--only", type=mini.numbers(str), default=[])
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    options = parser.parse_args()
    report = mini.Report(options)
    with studio(options.images, options.cfg, options.comfyui) as made_by:
        for sampler, scheduler in CASES:
            if options.only and sampler not in options.only:
                continue
            for steps in options.steps:
                runs = [
                    (steps, 0, 0.0),
                    *((steps, bands, asked) for bands in options.bands for asked in (0.0, *options.asked)),
                ]
                fewer = {count for bands in options.bands for count in same_time_steps(steps, STAGES, bands)}
                runs += [(count, 0, 0.0) for count in sorted(fewer)]
                latents, judged = made_by.judged(runs, sampler=sampler, scheduler=scheduler)
                exact = latents[runs[0]]
                for run in runs[1:]:
                    about = {"sampler": sampler, "scheduler": scheduler, "steps": steps}
                    report(about | row_of(run, latents[run], exact, judged[run]))


def row_of(run: tuple[int, int, float], latents: torch.Tensor, exact: torch.Tensor, judged: list) -> dict[str, Any]:
    """One row of the report, of a run (steps, patches, asked for)."""
    steps, bands, asked = run
    true = decibels(latents, exact)
    row: dict[str, Any] = {"mode": f"{bands} patches, or {STAGES}" if bands else f"one rank, {steps} steps instead"}
    row |= {"true_db": [round(value, 1) for value in (min(true), fmean(true), max(true))]}
    row |= {"picture": mini.closeness(mini.decode(latents), mini.decode(exact))}
    if bands:
        expected, exact_calls = zip(*judged, strict=True)
        row |= {"exact_calls": round(fmean(exact_calls), 1)}
        if asked:
            pairs = [(was, of) for was, of in zip(expected, true, strict=True) if was is not None and math.isfinite(was)]
            below = [of - was for was, of in pairs]
            row |= {"asked": asked, "missed": sum(of < asked for of in true), "worst_to_asked": round(min(true) - asked, 1)}
            if pairs:
                row |= {"true_less_expected": [round(value, 1) for value in (min(below), fmean(below), max(below))]}
    return row


if __name__ == "__main__":
    main()
