"""The main job on the bundled model: one rank, then two ranks with PipeFusion, Ulysses and split batch, side by side.

Run by scripts/quickstart. Prints a table and writes quickstart.png. Every rank computes with one CPU thread, so that two
ranks have twice what one rank has.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel_backend.checkpoints.checkpoint import open_own_class  # noqa: E402
from parallel_backend.client.loading import load_model  # noqa: E402
from parallel_backend.client.proven_class import call_of, prompt_for_class, proven  # noqa: E402
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole  # noqa: E402
from parallel_backend.core.degrees import Degrees  # noqa: E402
from parallel_backend.core.dtypes import resolve_dtype  # noqa: E402
from parallel_backend.core.own_class import OwnClass  # noqa: E402
from parallel_backend.core.setup import Setup  # noqa: E402
from parallel_backend.processes.pool import Pool  # noqa: E402
from parallel_backend.quickstart.codec import decode, process_out  # noqa: E402
from parallel_backend.quickstart.model import WEIGHTS, mini_flux  # noqa: E402
from scripts.digits import digit_prompts, read_digits  # noqa: E402

PROMPTS = ((3, 1, 4, 1), (2, 7, 1, 8), (5, 9, 2, 6), (0, 4, 7, 3))


LOOK, BUSY = 1.0, 0.25
"""Seconds for which other work is looked at, and how many of the ranks' cores it may keep busy without a word."""


@dataclass(frozen=True)
class Mode:
    name: str
    degrees: Degrees
    bands: int = 1


MODES = (
    Mode("one rank", Degrees()),
    Mode("PipeFusion, 2 stages, 4 patches", Degrees(pipe=2), bands=4),
    Mode("Ulysses, 2 ranks", Degrees(ulysses=2)),
    Mode("split batch, 2 replicas", Degrees(batch=2)),
)


@dataclass(frozen=True)
class Result:
    mode: Mode
    seconds: float
    images: torch.Tensor  # [B, 256, 256] in 0..1


def devices_for(ranks: int) -> tuple[str, ...]:
    """GPUs where there are two, CPU ranks otherwise; the same kind for every mode, so that the table compares."""
    if torch.cuda.device_count() >= 2:
        return tuple(f"cuda:{index}" for index in range(ranks))
    return ("cpu",) * ranks


def given(cfg: float) -> tuple[torch.Tensor, Prompt]:
    """The noise of the pictures, and their prompts."""
    noise = torch.randn(len(PROMPTS), 16, 32, 32, generator=torch.Generator().manual_seed(0))
    return noise, digit_prompts(torch.tensor(PROMPTS), cfg)


def tried() -> OwnClass:
    """The model's class, with what a trial proves of it."""
    noise, prompt = given(cfg=1.0)
    return proven(mini_flux(), call_of(noise, prompt.positive), Degrees(pipe=2, ulysses=2), WEIGHTS.name)


def run(pool: Pool, own: OwnClass, mode: Mode, steps: int, cfg: float) -> Result:
    """Sample the four prompts once, after two steps that warm the ranks up."""
    checkpoint = open_own_class(WEIGHTS, own)
    dtype = resolve_dtype("default", checkpoint.dtype, pool.devices, checkpoint.built.own.halves)
    setup = Setup(checkpoint.path, dtype, pool.devices, mode.degrees, "auto", "even", own_class=own)
    model = load_model(pool, checkpoint, setup, lambda: None)
    noise, digits = given(cfg)
    prompt = prompt_for_class(digits)

    def sample(count: int) -> torch.Tensor:
        if mode.bands == 1:
            return sample_whole(model, noise, linear_sigmas(count), prompt)
        return sample_in_bands(model, noise, linear_sigmas(count), prompt, mode.bands, warm_up=1)[0]

    sample(2)
    started = time.perf_counter()
    latent = sample(steps)
    return Result(mode, time.perf_counter() - started, decode(process_out(latent)))


def own_cores() -> int:
    """Cores that this process and its ranks may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_cores() -> float:
    """Cores that other work keeps busy, measured while this process sleeps."""
    return psutil.cpu_percent(LOOK) / 100 * (psutil.cpu_count() or 1)


def advice(devices: tuple[str, ...], cores: int, busy: float) -> str:
    """What to know of the table: what the ranks share, and whether other work on `busy` cores left them too few."""
    ranks, lines = len(devices), []
    if devices[0] == "cpu":
        lines.append(f"The {ranks} ranks share {cores} core{'s' * (cores > 1)}.")
        if cores < ranks:
            lines.append(f"They need {ranks} to be faster than one rank.")
    if busy > BUSY + max(0, cores - ranks):
        lines.append(f"Other work kept {busy:.1f} cores busy before the runs: the seconds and speed-ups are not comparable.")
        lines.append("Run this again when the machine is idle.")
    return "\n".join(lines)


def difference(result: Result, reference: Result) -> str:
    error = (result.images - reference.images).square().mean().item()
    return "-" if result is reference else "equal" if error < 1e-9 else f"{-10 * torch.tensor(error).log10():.1f} dB"


def share_read(result: Result) -> float:
    """Percent of the digits that a classifier trained on real ones reads as prompted."""
    return 100 * (torch.as_tensor(read_digits(result.images)) == torch.tensor(PROMPTS)).float().mean().item()


def picture(results: list[Result], path: Path) -> None:
    """One row per mode, one column per prompt."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(results), len(PROMPTS), figsize=(8, 2.2 * len(results)), layout="constrained")
    for row, result in zip(axes, results, strict=True):
        for axis, image, prompt in zip(row, result.images, PROMPTS, strict=True):
            axis.imshow(image.float().cpu(), cmap="gray_r", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_title(" ".join(map(str, prompt)), fontsize=8)
        speed = results[0].seconds / result.seconds
        row[0].set_ylabel(f"{result.mode.name}\n{result.seconds:.1f} s, {speed:.2f}x", fontsize=8)
    figure.suptitle("quickstart-digits: the same seeds on one and on two ranks")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cfg", type=float, default=3.0)
    parser.add_argument("--out", type=Path, default=ROOT / "quickstart.png")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cores, busy = own_cores(), busy_cores()
    results: list[Result] = []
    started = time.perf_counter()
    own = tried()
    print(f"== trial of {own.name}: {time.perf_counter() - started:.1f} s, all modes are proven", flush=True)
    for ranks in (1, 2):
        print(f"== starting {ranks} rank{'s' * (ranks > 1)} on {', '.join(devices_for(ranks))}", flush=True)
        pool = Pool(devices_for(ranks), threads=1)
        try:
            for mode in (mode for mode in MODES if mode.degrees.world == ranks):
                results.append(run(pool, own, mode, options.steps, options.cfg))
                print(f"   {mode.name}: {results[-1].seconds:.1f} s", flush=True)
        finally:
            pool.close()
    print(f"\n{len(PROMPTS)} pictures, {options.steps} steps, cfg {options.cfg}, one CPU thread per rank")
    print(f"{'mode':34}{'seconds':>9}{'speed-up':>10}{'to one rank':>13}{'digits read':>13}")
    for result in results:
        speed = results[0].seconds / result.seconds
        print(
            f"{result.mode.name:34}{result.seconds:9.2f}{speed:9.2f}x{difference(result, results[0]):>13}"
            f"{share_read(result):12.1f}%"
        )
    if said := advice(devices_for(2), cores, busy):
        print(said)
    picture(results, options.out)
    print(f"\nwrote {options.out}")


if __name__ == "__main__":
    main()
