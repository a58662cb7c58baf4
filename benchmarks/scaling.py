"""Two ranks against one on a random Flux-like model: PipeFusion, Ulysses and split batch, one CPU thread per rank.

    python benchmarks/scaling.py --rounds 3 --out benchmarks/results/scaling_NAME_DATE.json

Transformer and sampler loop only: no text encoder, no VAE, no loading. Every round runs each case once, in turn, so
that a drifting machine hits all alike; figures are medians over rounds, ratios are taken within a round. Two bounds
stand beside the ratios: PipeFusion's 1/(W/S + (1-W/S)/N), and what the machine leaves of its second core, taken from
two independent processes side by side.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel_backend.checkpoint import open_checkpoint  # noqa: E402
from parallel_backend.client import RemoteTransformer  # noqa: E402
from parallel_backend.config import Degrees  # noqa: E402
from parallel_backend.pool import Pool  # noqa: E402
from parallel_backend.quickstart.sampling import (  # noqa: E402
    Prompt,
    euler,
    linear_sigmas,
    sample_in_bands,
    sample_whole,
)
from tests import tiny  # noqa: E402

CONFIG = tiny.FLUX | {
    "num_layers": 4,
    "num_single_layers": 8,
    "attention_head_dim": 64,
    "num_attention_heads": 8,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (8, 28, 28),
    "guidance_embeds": False,
}
SIDE = 64  # latent rows and columns: 1,024 image tokens
TEXT = 32


def problem(batch: int) -> tuple[torch.Tensor, Prompt]:
    x, _, tensors = tiny.inputs(CONFIG, batch=batch, height=SIDE, width=SIDE, text=TEXT)
    return x, Prompt(tensors, {}, 1.0)


def plain_loop(path: Path, steps: int) -> float:
    """Seconds of diffusers' own forward in a plain loop in this process."""
    model = tiny.whole_model(path)
    x, prompt = problem(1)
    predict = lambda x, t, tensors: tiny.reference(model, x, t, tensors)  # noqa: E731
    euler(predict, x, linear_sigmas(1), prompt)
    started = time.perf_counter()
    euler(predict, x, linear_sigmas(steps), prompt)
    return time.perf_counter() - started


def independent(path: Path, steps: int, barrier, seconds) -> None:
    """One of the processes of `plain_loops`."""
    torch.set_num_threads(1)
    barrier.wait()
    seconds.put(plain_loop(path, steps))


def plain_loops(path: Path, steps: int, count: int) -> float:
    """Seconds of the slowest of `count` independent processes that run the plain loop at the same time."""
    context = multiprocessing.get_context("spawn")
    barrier, seconds = context.Barrier(count), context.Queue()
    processes = [context.Process(target=independent, args=(path, steps, barrier, seconds)) for _ in range(count)]
    for process in processes:
        process.start()
    slowest = max(seconds.get() for _ in processes)
    for process in processes:
        process.join()
    return slowest


def timed(model: RemoteTransformer, batch: int, bands: int, steps: int) -> float:
    x, prompt = problem(batch)

    def sample(sigmas: torch.Tensor) -> None:
        if bands:
            sample_in_bands(model, x, sigmas, prompt, bands, warm_up=1)
        else:
            sample_whole(model, x, sigmas, prompt)

    sample(linear_sigmas(2))
    started = time.perf_counter()
    sample(linear_sigmas(steps))
    return time.perf_counter() - started


def measure(path: Path, steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each case, one figure per round."""
    one, two = Pool(("cpu",), threads=1), Pool(("cpu", "cpu"), threads=1)
    checkpoint = open_checkpoint(path)

    def backend(pool: Pool, degrees: Degrees, batch: int = 1, bands: int = 0) -> Callable[[], float]:
        def case() -> float:
            model = RemoteTransformer(pool, checkpoint, degrees, "fp32", "auto", lambda: None)
            return timed(model, batch, bands, steps)

        return case

    cases = {
        "plain diffusers loop": lambda: plain_loops(path, steps, 1),
        "two plain loops side by side": lambda: plain_loops(path, steps, 2),
        "one rank": backend(one, Degrees()),
        "one rank, batch 2": backend(one, Degrees(), batch=2),
        "pipefusion 2, M=2": backend(two, Degrees(pipe=2), bands=2),
        "pipefusion 2, M=4": backend(two, Degrees(pipe=2), bands=4),
        "ulysses 2": backend(two, Degrees(ulysses=2)),
        "split_batch 2, batch 2": backend(two, Degrees(batch=2), batch=2),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    try:
        for turn in range(rounds):
            for name, case in cases.items():
                seconds[name].append(case())
                print(f"round {turn + 1}/{rounds}  {name:30} {seconds[name][-1]:8.2f} s", flush=True)
    finally:
        one.close()
        two.close()
    return seconds


def summary(seconds: dict[str, list[float]], steps: int) -> dict:
    """Medians, ratios and the bounds they are held against."""

    def ratio(numerator: str, denominator: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[numerator], seconds[denominator], strict=True))

    warm = 1 / steps
    bound = 1 / (warm + (1 - warm) / 2)
    speedups = {
        "pipefusion 2, M=2": (ratio("one rank", "pipefusion 2, M=2"), bound),
        "pipefusion 2, M=4": (ratio("one rank", "pipefusion 2, M=4"), bound),
        "ulysses 2": (ratio("one rank", "ulysses 2"), 2.0),
        "split_batch 2, batch 2": (ratio("one rank, batch 2", "split_batch 2, batch 2"), 2.0),
    }
    return {
        "date": date.today().isoformat(),
        "hardware": f"{platform.machine()} CPU, {multiprocessing.cpu_count()} cores, 1 thread per rank, "
        f"torch {torch.__version__}",
        "model": "Flux-like, random weights, hidden 512, 4 + 8 blocks, 1024 image + 32 text tokens, fp32",
        "scope": "transformer and sampler loop; no text encoder, VAE or loading",
        "steps": steps,
        "rounds": len(seconds["one rank"]),
        "median_seconds": {name: round(statistics.median(values), 2) for name, values in seconds.items()},
        "spread_seconds": {name: [round(min(values), 2), round(max(values), 2)] for name, values in seconds.items()},
        "one_rank_over_plain_loop": round(ratio("one rank", "plain diffusers loop"), 3),
        "two_independent_processes_speed": round(2 * ratio("plain diffusers loop", "two plain loops side by side"), 3),
        "speed_up": {
            name: {"measured": round(value, 3), "bound": round(limit, 3), "share_of_bound": round(value / limit, 3)}
            for name, (value, limit) in speedups.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = tiny.save_original(tiny.random_flux(CONFIG), CONFIG, Path(directory) / "flux-like.safetensors")
        result = summary(measure(path, options.steps, options.rounds), options.steps)
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
