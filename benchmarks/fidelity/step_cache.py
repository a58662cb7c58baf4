"""What the step cache costs and gains on the trained mini model, beside fewer steps: the control that needs no cache.

    python -m benchmarks.fidelity.step_cache --images 400 --out benchmarks/results/step_cache_mini_400_NAME_DATE.json

For each number of steps and of PipeFusion's patches (one warm-up step; 0: whole calls, exact): the calls computed, the
digits read, and the PSNR (decoded pictures in 0..1, mean over pictures) to the uncached run of the same steps and patches,
of the cache at each threshold and of as many steps as the cache computed calls (rounded up), sampled in the same way.
`to_exact_psnr_db`: to the whole uncached run, where 0 is among `--bands`, first.

What a band sees depends on the number of patches alone, so pictures are computed with split_batch to use every core.
Seconds are those of two stages and a picture at a time, uncached, cached and with fewer steps in turn (`--rounds`), medians;
`speedup` is the ratio of uncached to this within a round, its median.
"""

import statistics
import time

import torch

from benchmarks.harness import mini_model as mini
from benchmarks.harness.mini_model import judge, load, pictures, sample_latents
from parallel_backend.core.degrees import Degrees


def main() -> None:
    parser = mini.parser(__doc__, 400)
    parser.add_argument("--steps", type=mini.numbers(int), default=[30, 20])
    parser.add_argument("--bands", type=mini.numbers(int), default=[0, 2, 4])
    parser.add_argument("--thresholds", type=mini.numbers(float), default=[0.04])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    symbols, noise = mini.requests(options.images)
    report = mini.Report(options)
    model = load(Degrees(batch=2))
    timed: list[tuple[int, int, float, int]] = []  # steps, bands, threshold, steps instead
    for steps in options.steps:
        exact = None
        for bands in options.bands:
            mode = f"pipefusion M={bands}" if bands else "one rank"
            latents, _ = sample_latents(model, symbols, noise, steps, bands, options.cfg)
            uncached = pictures(latents)
            exact = exact if bands else uncached

            def judged(images: torch.Tensor, exact=exact, uncached=uncached) -> dict:
                figures = judge(images, uncached, symbols)
                to_exact = None if exact is None else judge(images, exact, symbols).get("psnr_db")
                return figures | ({} if to_exact is None else {"to_exact_psnr_db": to_exact})

            report({"steps": steps, "mode": mode, "computed": steps, **judged(uncached)})
            instead = set()
            for threshold in options.thresholds:
                latents, computed = sample_latents(model, symbols, noise, steps, bands, options.cfg, threshold)
                mean = statistics.fmean(computed)
                fewer = min(steps, int(-(-mean // 1)))
                name = f"{mode}, cache {threshold:g}"
                report({"steps": steps, "mode": name, "computed": round(mean, 2), **judged(pictures(latents))})
                instead.add(fewer)
                if bands:
                    timed.append((steps, bands, threshold, fewer))
            for fewer in sorted(instead):
                images = pictures(sample_latents(model, symbols, noise, fewer, bands, options.cfg)[0])
                report({"steps": steps, "mode": f"{mode}, {fewer} steps instead", "computed": fewer, **judged(images)})
    model.pool.close()
    if not options.rounds:
        return
    model = load(Degrees(pipe=2))
    sample_latents(model, symbols[:1], noise[:1], 4, 2, options.cfg)
    for steps, bands, threshold, fewer in timed:
        taken: dict[str, list[float]] = {"uncached": [], f"cache {threshold:g}": [], f"{fewer} steps instead": []}
        settings = zip(taken, ((steps, 0.0), (steps, threshold), (fewer, 0.0)), strict=True)
        settings = [(name, *values) for name, values in settings]
        for _ in range(options.rounds):
            for name, count, limit in settings:
                began = time.perf_counter()
                sample_latents(model, symbols[:1], noise[:1], count, bands, options.cfg, limit)
                taken[name].append(time.perf_counter() - began)
        for name, found in taken.items():
            ratio = statistics.median(a / b for a, b in zip(taken["uncached"], found, strict=True))
            row = {"seconds": round(statistics.median(found), 2), "speedup": round(ratio, 2)}
            report({"steps": steps, "mode": f"pipefusion M={bands} on 2 stages, {name}", **row})
    model.pool.close()


if __name__ == "__main__":
    main()
