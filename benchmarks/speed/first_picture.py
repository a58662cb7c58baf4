"""What surrounds sampling: starting processes, loading, the first picture from nothing, the next one, and with a VAE.

Each case begins with no process of its own; imports and start-up count. The weights' file is in the page cache.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.harness import measuring
from benchmarks.harness.subjects import GUIDED_FLUX_LIKE, Subject
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import euler, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from testing.models import on_ranks
from testing.vaes import OnRanks, made_of, small_vae

from .two_ranks import Mode

SCOPE = "everything from starting processes to the picture's latent, by its parts; no text encoder"
MODES = {
    "one rank": Mode(Degrees()),
    "pipefusion M=2": Mode(Degrees(pipe=2), bands=2),
    "ulysses": Mode(Degrees(ulysses=2)),
}
PLAIN = "plain diffusers"
SUBJECT = GUIDED_FLUX_LIKE.at(side=32)

PARTS = ("start", "load", "first picture, from nothing", "next picture")
VAE_PARTS = ("to the VAE", "decode")

Seconds = dict[str, float]
"""By part."""


class Lap:
    """Seconds between points in time, by name."""

    def __init__(self) -> None:
        self.began = self._last = time.perf_counter()
        self.seconds: Seconds = {}

    def __call__(self, name: str, since_begin: bool = False) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - (self.began if since_begin else self._last), now


def ranks_seconds(subject: Subject, path: Path, with_vae: bool, mode: Mode) -> Seconds:
    x, prompt = subject.problem_of_ranks()
    sigmas, lap = linear_sigmas(subject.steps), Lap()

    def sample(model: RemoteTransformer) -> torch.Tensor:
        if mode.bands:
            return sample_in_bands(model, x, sigmas, prompt, mode.bands, warm_up=1)[0]
        return sample_whole(model, x, sigmas, prompt)

    with closing(Pool(("cpu",) * mode.degrees.world, threads=1)) as pool:
        pool.ready.result()
        lap("start")
        model = on_ranks(pool, subject.opened(path), mode.degrees, "fp32", "auto", lambda: None)
        lap("load")
        latent = sample(model)
        lap("first picture, from nothing", since_begin=True)
        sample(model)
        lap("next picture")
        if with_vae:
            made = made_of(small_vae(subject.latent[0]))
            decoder = OnRanks(pool, "vae", lambda: made)
            decoder.run(latent[:, :, : mode.degrees.world, :1], lambda: None)
            lap("to the VAE")
            decoder.run(latent, lambda: None)
            lap("decode")
    return lap.seconds


def _plain(subject: Subject, path: Path, with_vae: bool, connection: Connection) -> None:
    torch.set_num_threads(1)
    connection.send(None)
    model = subject.load(path)
    connection.send(None)
    x, prompt = subject.problem()
    sigmas = linear_sigmas(subject.steps)
    latent = euler(subject.predict(model), x, sigmas, prompt)
    connection.send(None)
    euler(subject.predict(model), x, sigmas, prompt)
    connection.send(None)
    if with_vae:
        vae = small_vae(subject.latent[0])
        with torch.inference_mode():
            vae.decode(latent[:, :, :1, :1])
            connection.send(None)
            vae.decode(latent)
            connection.send(None)


def in_a_process(subject: Subject, path: Path, with_vae: bool) -> Seconds:
    """A process that imports torch and diffusers, loads, and samples."""
    lap = Lap()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_plain, args=(subject, path, with_vae, theirs))
    process.start()
    theirs.close()
    for name in PARTS + (VAE_PARTS if with_vae else ()):
        ours.recv()
        lap(name, since_begin=name.startswith("first"))
    process.join()
    return lap.seconds


def run(
    rounds: int,
    say: Callable[[str], None],
    with_vae: bool = False,
    subject: Subject = SUBJECT,
    modes: dict[str, Mode] = MODES,
) -> dict:
    """The result: by case and part, seconds (median, and each round's)."""
    found: dict[str, list[Seconds]] = {}
    with TemporaryDirectory() as directory:
        path = subject.save(Path(directory))
        subject.for_others(path)
        cases = {PLAIN: partial(in_a_process, subject, path, with_vae)}
        cases |= {name: partial(ranks_seconds, subject, path, with_vae, mode) for name, mode in modes.items()}
        for turn in range(rounds):
            for name, case in cases.items():
                seconds = case()
                found.setdefault(name, []).append(seconds)
                parts = ", ".join(f"{part} {value:.2f}" for part, value in seconds.items())
                say(f"round {turn + 1}/{rounds}  {name:16} {parts} s")
    scope = SCOPE + ("; decoded by a small autoencoder" if with_vae else "")
    return measuring.head("first_picture", subject, rounds, scope) | {
        "cases": {
            name: {
                part: {
                    "median": round(statistics.median(run[part] for run in runs), 3),
                    "rounds": [round(run[part], 3) for run in runs],
                }
                for part in runs[0]
            }
            for name, runs in found.items()
        }
    }
