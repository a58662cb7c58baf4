"""What the speed benchmarks share: the model, one timed run of a case, interleaved rounds, the head of a result.

A case is a function that runs once and returns its Outcome. Every round runs each case once, in turn, so that a
drifting machine hits all alike; figures are medians over rounds, ratios are taken within a round.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.quickstart.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.wire.sampling import RunStats
from tests.support import tiny

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
REHEARSAL = 2  # steps before the clock starts: one warm-up step of PipeFusion and one in bands


@dataclass(frozen=True)
class Outcome:
    """One run of one case: seconds of the sampling loop, and what came of it. By rank, empty where ranks are not ours."""

    seconds: float
    sample: torch.Tensor
    stats: tuple[RunStats, ...] = ()
    weight_bytes: tuple[int, ...] = ()


Cases = Mapping[str, Callable[[], Outcome]]
Outcomes = dict[str, list[Outcome]]
"""By case, one for each round."""


@contextmanager
def weights() -> Iterator[Path]:
    """The model's file, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as directory:
        yield tiny.save_original(tiny.random_flux(CONFIG), CONFIG, Path(directory) / "flux-like.safetensors")


def problem(batch: int, side: int = SIDE) -> tuple[torch.Tensor, Prompt]:
    x, _, tensors = tiny.inputs(CONFIG, batch=batch, height=side, width=side, text=TEXT)
    return x, Prompt(tensors, {}, 1.0)


def run_ranks(model: RemoteTransformer, steps: int, batch: int = 1, bands: int = 0, side: int = SIDE) -> Outcome:
    """Our ranks. `bands`: PipeFusion's patches, 1 for displaced patches; 0 where every call is whole (see sampling.py)."""
    x, prompt = problem(batch, side)
    report = lambda: model.close_run(model.open_run(), lambda: None)  # noqa: E731

    def sample(sigmas: torch.Tensor) -> tuple[torch.Tensor, list[RunStats]]:
        if bands:
            return sample_in_bands(model, x, sigmas, prompt, bands, warm_up=1)
        return sample_whole(model, x, sigmas, prompt), report()

    sample(linear_sigmas(REHEARSAL))
    report()  # what the rehearsal and the loading moved is not this run's
    started = time.perf_counter()
    latent, stats = sample(linear_sigmas(steps))
    return Outcome(time.perf_counter() - started, latent, tuple(stats), tuple(model.weight_bytes))


def interleave(cases: Cases, rounds: int) -> Outcomes:
    outcomes: Outcomes = {name: [] for name in cases}
    for turn in range(rounds):
        for name, case in cases.items():
            outcomes[name].append(case())
            print(f"round {turn + 1}/{rounds}  {name:30} {outcomes[name][-1].seconds:8.2f} s", flush=True)
    return outcomes


def seconds(outcomes: list[Outcome]) -> list[float]:
    return [outcome.seconds for outcome in outcomes]


def median(outcomes: list[Outcome]) -> float:
    return round(statistics.median(seconds(outcomes)), 2)


def spread(outcomes: list[Outcome]) -> list[float]:
    return [round(min(seconds(outcomes)), 2), round(max(seconds(outcomes)), 2)]


def ratios(numerator: list[Outcome], denominator: list[Outcome]) -> list[float]:
    """Of the times, round by round."""
    return [a / b for a, b in zip(seconds(numerator), seconds(denominator), strict=True)]


def ratio(numerator: list[Outcome], denominator: list[Outcome]) -> float:
    return statistics.median(ratios(numerator, denominator))


def hardware() -> str:
    return f"{platform.machine()} CPU, {multiprocessing.cpu_count()} cores, 1 thread per rank, torch {torch.__version__}"


def head(steps: int, outcomes: Outcomes) -> dict:
    """What a result says first: what was measured, on what, how often."""
    return {
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "model": "Flux-like, random weights, hidden 512, 4 + 8 blocks, 1024 image + 32 text tokens, fp32",
        "scope": "transformer and sampler loop; no text encoder, VAE or loading",
        "steps": steps,
        "rounds": len(next(iter(outcomes.values()))),
    }


def parser(description: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--out", type=Path)
    return options


def report(result: dict, out: Path | None) -> None:
    """Print the result and, if asked for, keep it."""
    text = json.dumps(result, indent=1)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
