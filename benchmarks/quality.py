"""How far PipeFusion is from one rank on the trained mini model, and how far fewer steps would be: the rarer control.

    python benchmarks/quality.py --images 400 --out benchmarks/results/quality_NAME_DATE.json
    python benchmarks/quality.py --images 400 --steps 20 --bands "" --patches 2,4 --out ...

For each number of steps: the digits read and the PSNR to the exact run (decoded pictures in 0..1, mean over pictures)
of PipeFusion with one warm-up step and M bands, of displaced patches with one warm-up step and of naive patches, and of
one rank with steps dropped to the time predicted for PipeFusion on two stages.
What a band sees depends on M alone, not on the number of stages (tests/test_exactness.py), so the pictures are
computed with split_batch to use every core; `--stages 2,4` recomputes some with that many stages and reports the
largest difference.
"""

import argparse
import json
import math
import platform
import sys
import time
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel_backend.checkpoint import open_checkpoint  # noqa: E402
from parallel_backend.client import RemoteTransformer  # noqa: E402
from parallel_backend.config import Degrees  # noqa: E402
from parallel_backend.pool import Pool  # noqa: E402
from parallel_backend.quickstart.codec import decode, process_out  # noqa: E402
from parallel_backend.quickstart.digits import read_digits  # noqa: E402
from parallel_backend.quickstart.model import WEIGHTS  # noqa: E402
from parallel_backend.quickstart.prompt import CELLS  # noqa: E402
from parallel_backend.quickstart.sampling import (  # noqa: E402
    digit_prompts,
    linear_sigmas,
    sample_in_bands,
    sample_whole,
)
from parallel_backend.schedule import StageCost, finish_times  # noqa: E402

CHUNK = 20  # pictures per request


def load(degrees: Degrees) -> RemoteTransformer:
    pool = Pool(("cpu",) * degrees.world, threads=1)
    return RemoteTransformer(pool, open_checkpoint(WEIGHTS), degrees, "fp32", "auto", lambda: None)


def sample(model: RemoteTransformer, symbols: torch.Tensor, noise: torch.Tensor, steps: int, bands: int, cfg: float):
    """Pictures [N, 256, 256]; `bands` 0 runs every call whole, 1 is for displaced patches."""
    images = []
    for part, start in zip(symbols.split(CHUNK), noise.split(CHUNK), strict=True):
        prompt, sigmas = digit_prompts(part, cfg), linear_sigmas(steps)
        if bands:
            latent, _ = sample_in_bands(model, start, sigmas, prompt, bands, warm_up=1)
        else:
            latent = sample_whole(model, start, sigmas, prompt)
        images.append(decode(process_out(latent)))
    return torch.cat(images)


def judge(images: torch.Tensor, exact: torch.Tensor, symbols: torch.Tensor) -> dict[str, float]:
    """`psnr_db`: mean over pictures; `pooled_psnr_db`: of the mean squared error over all pictures."""
    error = (images - exact).square().flatten(1).mean(1)
    read = 100 * (torch.as_tensor(read_digits(images)) == symbols).float().mean().item()
    if error.max() == 0:
        return {"digits_read_percent": round(read, 2)}
    psnr = -10 * error.clamp_min(1e-12).log10()
    return {
        "digits_read_percent": round(read, 2),
        "psnr_db": round(psnr.mean().item(), 2),
        "pooled_psnr_db": round(-10 * error.mean().log10().item(), 2),
        "worst_psnr_db": round(psnr.min().item(), 2),
    }


def same_time_steps(steps: int, stages: int, bands: int) -> set[int]:
    """Steps that one rank makes in the time predicted for PipeFusion: rounded down, and up in favour of the control."""
    piped = finish_times([True] + [False] * (steps - 1), bands, [StageCost(0.0, 1 / stages)] * stages)[-1]
    return {math.floor(piped), min(steps - 1, math.ceil(piped))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--steps", type=lambda text: [int(part) for part in text.split(",")], default=[20, 8, 4])
    parser.add_argument("--bands", type=lambda text: [int(part) for part in text.split(",") if part], default=[2, 4, 8])
    parser.add_argument("--patches", type=lambda text: [int(part) for part in text.split(",") if part], default=[])
    parser.add_argument("--stages", type=lambda text: [int(part) for part in text.split(",") if part], default=[])
    parser.add_argument("--cfg", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(2026)
    symbols = torch.randint(10, (options.images, CELLS), generator=generator)
    noise = torch.randn(options.images, 16, 32, 32, generator=generator)
    rows = []
    started = time.perf_counter()

    def report(row: dict) -> None:
        rows.append(row)
        print(f"[{time.perf_counter() - started:6.0f} s] {row}", flush=True)
        if options.out is not None:
            about = {
                "date": date.today().isoformat(),
                "hardware": f"{platform.machine()}, CPU, 2 ranks of 1 thread, fp32, torch {torch.__version__}",
                "images": options.images,
                "cfg": options.cfg,
                "rows": rows,
            }
            options.out.write_text(json.dumps(about, indent=1) + "\n")

    model = load(Degrees(batch=2))
    references: dict[int, torch.Tensor] = {}
    pipefusion: dict[tuple[int, int], torch.Tensor] = {}
    for steps in options.steps:
        exact = references[steps] = sample(model, symbols, noise, steps, 0, options.cfg)
        report({"steps": steps, "mode": "one rank", **judge(exact, exact, symbols)})
        for bands in options.bands:
            images = pipefusion[steps, bands] = sample(model, symbols, noise, steps, bands, options.cfg)
            report({"steps": steps, "mode": f"pipefusion M={bands}", **judge(images, exact, symbols)})
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
