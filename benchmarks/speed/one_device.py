"""One device: what the backend costs beside diffusers, and what a step costs when it is cut into bands.

The same Flux-shaped weights in both, on the same CUDA device in bf16 (or, to see that it runs, on a CPU in fp32). A
transformer step is timed by the rank itself (its timeline: CUDA events, the host's clock on a CPU), diffusers' by the same
kind of clock around its forward; a loop's step is the whole loop's time over its steps, the sampler's and the client's
included. The memory of both must fit the device at once: the rounds are interleaved.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.harness import measuring
from benchmarks.harness.measuring import figure, run_plain
from benchmarks.harness.pools import Pools
from benchmarks.harness.subjects import FLUX_SCHNELL, Subject
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from parallel_backend.wire.timeline_kinds import WORK
from testing import mini
from testing.models import on_ranks

SIDES = (128, 256)
"""Latent pixels: pictures of 1024 and 2048 pixels square."""
STEPS = 8
BANDS = 4
LIMITS = {"transformer step over diffusers": 1.02, "bands of a step over a whole step": 1.08}


class Stopwatch:
    """Seconds of every call of a function, on the device's own clock."""

    def __init__(self, call: Callable, device: str):
        self._call, self._cuda = call, device.startswith("cuda")
        self._spans: list[tuple] = []

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __call__(self, *given: object) -> object:
        started = self._now()
        out = self._call(*given)
        self._spans.append((started, self._now()))
        return out

    def take(self) -> list[float]:
        spans, self._spans = self._spans, []
        if self._cuda:
            torch.cuda.synchronize()
            return [started.elapsed_time(stopped) / 1000 for started, stopped in spans]
        return [stopped - started for started, stopped in spans]


def rank_steps(model: RemoteTransformer) -> tuple[list[float], list[float]]:
    """Of the last run on the one rank, in order: seconds of each whole exact micro-step, and of each band's."""
    timeline = model.timeline(lambda: None)[0]
    of_work = timeline.labels[:, 0] == WORK
    seconds = (timeline.times[:, 1] - timeline.times[:, 0])[of_work]
    exact = timeline.labels[of_work][:, 4] == 1
    return seconds[exact].tolist(), seconds[~exact].tolist()


def settled(values: list[float]) -> float:
    """Median of a run's steps but the first two, in which kernels are chosen and buffers made."""
    return statistics.median(values[2:] or values)


def _rounds(
    subject: Subject, model: torch.nn.Module, remote: RemoteTransformer, device: str, rounds: int, say: Callable[[str], None]
) -> dict:
    forward = Stopwatch(subject.predict(model), device)
    x, prompt = subject.problem_of_ranks()
    sigmas = linear_sigmas(subject.steps)
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    samples = {}
    for turn in range(rounds):
        plain = run_plain(subject, forward, device=device)
        note("diffusers: forward", settled(forward.take()))
        note("diffusers: loop per step", plain.seconds / subject.steps)
        samples["plain"] = plain.sample

        sample_whole(remote, x, linear_sigmas(measuring.REHEARSAL), prompt)
        remote.begin_timeline()
        started = time.perf_counter()
        samples["whole"] = sample_whole(remote, x, sigmas, prompt)
        note("backend: loop per step", (time.perf_counter() - started) / subject.steps)
        note("backend: forward", settled(rank_steps(remote)[0]))

        remote.begin_timeline()
        sample_in_bands(remote, x, sigmas, prompt, BANDS, warm_up=1)
        bands = rank_steps(remote)[1]
        steps = [sum(bands[at : at + BANDS]) for at in range(0, len(bands), BANDS)]
        note(f"backend: {BANDS} bands of a step", settled(steps))
        whole = found["backend: forward"][-1]
        figures = (found["diffusers: forward"][-1], whole, found[f"backend: {BANDS} bands of a step"][-1])
        row = "diffusers {:.4f} s, backend {:.4f} s, in bands {:.4f} s".format(*figures)
        say(f"round {turn + 1}/{rounds}  {subject.tokens} tokens: {row}")

    def over(numerator: str, denominator: str) -> dict:
        return figure([a / b for a, b in zip(found[numerator], found[denominator], strict=True)], 4)

    ratios = {
        "transformer step over diffusers": over("backend: forward", "diffusers: forward"),
        "loop over diffusers' loop": over("backend: loop per step", "diffusers: loop per step"),
        "bands of a step over a whole step": over(f"backend: {BANDS} bands of a step", "backend: forward"),
    }
    return {
        "tokens": subject.tokens,
        "seconds": {name: figure(values, 5) for name, values in found.items()},
        "ratios": ratios,
        "limits": LIMITS,
        "relative_difference": float(f"{mini.relative(samples['whole'], samples['plain']):.2g}"),
        "peak_MB_of_rank": round(remote.close_run(remote.open_run(), lambda: None)[0].peak_bytes / 1e6),
    }


@torch.inference_mode()
def run(
    rounds: int,
    say: Callable[[str], None],
    device: str,
    subject: Subject = FLUX_SCHNELL,
    sides: tuple[int, ...] = SIDES,
    steps: int = STEPS,
    layers: int | None = None,
    compiled: bool = False,
    pools: Callable[[int], Pool] | None = None,
) -> dict:
    """The result. `compiled`: the rank compiles its blocks, and diffusers' are compiled in their own way."""
    whole = replace(subject, dtype="bf16" if device.startswith("cuda") else "fp32").at(layers=layers)
    with TemporaryDirectory() as directory, ExitStack() as stack:
        say(f"writing the weights of: {whole}")
        path = whole.save(Path(directory))
        whole.for_others(path)
        model = whole.load(path, device)
        if compiled:
            model.compile_repeated_blocks(fullgraph=True)
        pool = (pools or stack.enter_context(Pools(device)))(1)
        checkpoint = subject.opened(path)
        remote = on_ranks(pool, checkpoint, Degrees(), whole.dtype, "auto", lambda: None, compile=compiled)
        sizes = [_rounds(replace(whole, side=side, steps=steps), model, remote, device, rounds, say) for side in sides]
    return measuring.head(
        "one_device", replace(whole, side=sides[0], steps=steps), rounds, devices=("cuda:0" if device == "cuda" else device,)
    ) | {
        "bands": BANDS,
        "compiled": compiled,
        "sizes": sizes,
    }
