"""What benchmarks of video share: the trained mini video model, the videos asked of it, how they are judged."""

import functools
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness import mini_model, moving_digits
from benchmarks.harness.mini_model import closeness
from parallel_backend.checkpoints.checkpoint import Checkpoint, open_own_class
from parallel_backend.client import proven_class
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.built.built_class import BuiltClass
from parallel_backend.own_class.calls.tried_calls import Call
from parallel_backend.processes.pool import Pool
from parallel_backend.quickstart.model import mini_wan
from testing.models import on_ranks

WEIGHTS = Path(__file__).parents[1] / "assets" / "moving-digits.safetensors"
TIMESTEP = 1000.0
"""Wan's at sigma 1."""
START = 0.75
"""Noise level that videos are denoised from, as with `denoise` 0.75 in a sampler. From pure noise the model draws digits,
but not on one path: it was not trained for long enough to agree with itself over all frames."""


def load(degrees: Degrees, transfer_dtype: str = "full") -> RemoteTransformer:
    pool = Pool(("cpu",) * degrees.world, threads=1)
    return on_ranks(pool, opened(), degrees, "fp32", "auto", lambda: None, transfer_dtype=transfer_dtype)


def opened() -> Checkpoint:
    checkpoint = open_own_class(WEIGHTS, proven())
    assert isinstance(checkpoint.built, BuiltClass)
    return replace(checkpoint, built=replace(checkpoint.built, call=example()))


@functools.cache
def proven() -> OwnClass:
    """The class, with what a trial shows of it."""
    return proven_class.proven(mini_wan(), example(), Degrees(pipe=2, ulysses=2), "the mini video model")


def example() -> Call:
    """A call as a trial gets it."""
    asked, latents = requests(1)
    return proven_class.call_of(latents, {"context": moving_digits.encode_prompts(asked)})


def requests(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits and directions [count, 2], and real videos with noise to START [count, *LATENT], the same ones every time."""
    generator = torch.Generator().manual_seed(2026)
    videos, prompts = moving_digits.sample_videos(count, generator)
    latents = moving_digits.encode(videos)
    return prompts, latents.lerp(torch.randn(latents.shape, generator=generator), START)


def prompts_of(prompts: torch.Tensor, cfg: float) -> Prompt:
    """Of digits and directions [B, 2], with the unconditional prompt as negative."""
    positive, negative = (moving_digits.encode_prompts(each) for each in (prompts, torch.full_like(prompts, -1)))
    return proven_class.prompt_for_class(Prompt({"context": positive}, {"context": negative}, cfg, TIMESTEP))


def sample(
    model: RemoteTransformer,
    prompts: torch.Tensor,
    noise: torch.Tensor,
    steps: int,
    bands: int,
    cfg: float,
    along: str = "rows",
    threshold: float = 0.0,
) -> tuple[torch.Tensor, list[int]]:
    """Videos [N, T, H, W] in 0..1, and the rest as of mini_model.sample_latents."""
    given = model, prompts, noise, steps, bands, cfg, threshold, prompts_of, along, START
    latents, computed = mini_model.sample_latents(*given)
    return moving_digits.decode(latents), computed


def judge(videos: torch.Tensor, exact: torch.Tensor, prompts: torch.Tensor) -> dict[str, float]:
    """The share of frames that show the digit where it should be, and the closeness to `exact`.

    `change_psnr_db`: closeness of what changes from each frame to the next, which shows a jump between two bands of frames.
    """
    read = 100 * moving_digits.read_videos(videos, prompts).float().mean().item()
    change = closeness(videos.diff(dim=1), exact.diff(dim=1)).get("psnr_db")
    found = {"frames_read_percent": round(read, 2), **closeness(videos, exact)}
    return found if change is None else found | {"change_psnr_db": change}
