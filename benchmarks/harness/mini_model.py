"""What benchmarks of quality share: the trained mini model, the pictures asked of it, how they are judged and reported."""

import argparse
import json
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from benchmarks.harness.needs import need
from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.proven_class import prompt_for_class
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.client.step_cache import StepCache
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from parallel_backend.quickstart.codec import decode, process_out
from parallel_backend.quickstart.model import WEIGHTS
from parallel_backend.quickstart.prompt import CELLS
from scripts.digits import digit_prompts, read_digits
from testing import mini
from testing.models import on_ranks

CHUNK = 20  # pictures per request


def load(degrees: Degrees) -> RemoteTransformer:
    pool = Pool(("cpu",) * degrees.world, threads=1)
    return on_ranks(pool, opened(), degrees, "fp32", "auto", lambda: None)


def opened() -> Checkpoint:
    return mini.opened(WEIGHTS, height=32, width=32, text=CELLS)


def prompts_of(symbols: torch.Tensor, cfg: float) -> Prompt:
    """Of digits [B, CELLS], with the unconditional prompt as negative."""
    return prompt_for_class(digit_prompts(symbols, cfg))


def requests(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits [count, CELLS] and noise [count, 16, 32, 32], the same ones every time."""
    generator = torch.Generator().manual_seed(2026)
    return torch.randint(10, (count, CELLS), generator=generator), torch.randn(count, 16, 32, 32, generator=generator)


def sample_latents(
    model: RemoteTransformer,
    symbols: torch.Tensor,
    noise: torch.Tensor,
    steps: int,
    bands: int,
    cfg: float,
    threshold: float = 0.0,
    prompt_of: Callable[[torch.Tensor, float], Prompt] = prompts_of,
    along: str = "rows",
    start: float = 1.0,
    warm_up: int = 1,
) -> tuple[torch.Tensor, list[int]]:
    """Latents like `noise`, and the calls computed by request of CHUNK pictures (or videos).

    `bands` 0 runs every call whole, 1 is for displaced patches. `threshold`: of the step cache, 0 for none. `prompt_of`:
    `symbols` [N, ...] and cfg -> the prompt. `along`: the axis that bands cut. `start`: noise level of `noise`.
    `warm_up`: exact steps of a run in bands.
    """
    latents, computed = [], []
    for part, x in zip(symbols.split(CHUNK), noise.split(CHUNK), strict=True):
        prompt, sigmas = prompt_of(part, cfg), start * linear_sigmas(steps)
        cache = StepCache(threshold, max(1, bands)) if threshold else None
        if bands:
            latent, _ = sample_in_bands(model, x, sigmas, prompt, bands, warm_up, cache=cache, along=along)
        else:
            latent = sample_whole(model, x, sigmas, prompt, cache=cache)
        latents.append(latent)
        computed.append(steps if cache is None else cache.computed)
    return torch.cat(latents), computed


def pictures(latents: torch.Tensor) -> torch.Tensor:
    """[N, 256, 256] in 0..1."""
    return decode(process_out(latents))


def sample(model: RemoteTransformer, symbols: torch.Tensor, noise: torch.Tensor, steps: int, bands: int, cfg: float):
    """The pictures of sample_latents, without a step cache."""
    return pictures(sample_latents(model, symbols, noise, steps, bands, cfg)[0])


def judge(images: torch.Tensor, exact: torch.Tensor, symbols: torch.Tensor) -> dict[str, float]:
    """The share of digits that are read as asked for, and the closeness to `exact`."""
    read = 100 * (torch.as_tensor(read_digits(images)) == symbols).float().mean().item()
    return {"digits_read_percent": round(read, 2), **closeness(images, exact)}


def closeness(images: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """`psnr_db`: mean over pictures; `pooled_psnr_db`: of the mean squared error over all pictures. Nothing if equal."""
    error = (images - exact).square().flatten(1).mean(1)
    if error.max() == 0:
        return {}
    psnr = -10 * error.clamp_min(1e-12).log10()
    return {
        "psnr_db": round(psnr.mean().item(), 2),
        "pooled_psnr_db": round(-10 * error.mean().log10().item(), 2),
        "worst_psnr_db": round(psnr.min().item(), 2),
    }


def numbers(kind: type) -> Callable[[str], list]:
    """For an option that is a list, such as 20,8,4."""
    return lambda text: [kind(part) for part in text.split(",") if part]


def parser(description: str, images: int) -> argparse.ArgumentParser:
    """`images`: how many, unless it is said."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--images", type=int, default=images)
    made.add_argument("--cfg", type=float, default=3.0)
    made.add_argument("--out", type=Path)
    return made


class Report:
    """Rows, each shown at once and the file written anew with it, so that a run that is cut off leaves what it has.

    `about`: what else the file says in front of its rows.
    """

    def __init__(self, options: argparse.Namespace, **about: str):
        need("sklearn", "what reads the digits of the pictures")
        self._out, self._rows, self._started = options.out, [], time.perf_counter()
        self._about = {
            "date": date.today().isoformat(),
            "hardware": f"{platform.machine()}, CPU, 2 ranks of 1 thread, fp32, torch {torch.__version__}",
            **about,
            "images": options.images,
            "cfg": options.cfg,
        }

    def __call__(self, row: dict) -> None:
        self._rows.append(row)
        print(f"[{time.perf_counter() - self._started:6.0f} s] {row}", flush=True)
        if self._out is not None:
            self._out.write_text(json.dumps(self._about | {"rows": self._rows}, indent=1) + "\n")
