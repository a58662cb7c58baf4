"""Compiled blocks beside eager ones: diffusers alone, one rank, and two stages of PipeFusion.

    python -m benchmarks.speed.compile --rounds 3 --out benchmarks/results/compile_NAME_DATE.json

On CPUs one thread a rank and fp32, a Flux-like model; where there is a CUDA device, bf16 and blocks of Flux's own size (two
stages where there are two devices). diffusers is compiled by its `compile_repeated_blocks`. Every case has a process of its
own for the whole time, and the first run, in which graphs are made, counts apart. `cpu_seconds` are of the processes that
compute: what a busy machine does not change.
"""

import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.harness import measuring
from benchmarks.harness.subjects import DEEPEST_FLUX_LIKE, FLUX_SCHNELL, Subject
from parallel_backend.client.sampling import euler, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from testing import mini
from testing.models import on_ranks

BLOCKS = 12
BANDS = 4


def choose_subject(steps: int) -> tuple[Subject, tuple[str, ...]]:
    """The model, and the devices to run it on."""
    if torch.cuda.is_available():
        devices = tuple(f"cuda:{index}" for index in range(min(2, torch.cuda.device_count())))
        return replace(FLUX_SCHNELL, dtype="bf16").at(layers=BLOCKS, steps=steps), devices
    return DEEPEST_FLUX_LIKE.at(steps=steps), ("cpu", "cpu")


@dataclass(frozen=True)
class Run:
    """`first`: seconds of the first run of two steps, graphs and all. `cpu`: seconds of the computing processes."""

    seconds: float
    cpu: float
    first: float
    sample: torch.Tensor


def plain_process(subject: Subject, path: Path, device: str, compiled: bool, connection: Connection) -> None:
    """Answers every message on the connection with a run of the plain loop."""
    torch.set_num_threads(1)
    model = subject.load(path, device)
    if compiled:
        model.compile_repeated_blocks(fullgraph=True, dynamic=False)
    x, prompt = subject.problem()
    predict = subject.predict(model)
    started = time.perf_counter()
    euler(predict, x, linear_sigmas(measuring.REHEARSAL), prompt)
    first = time.perf_counter() - started
    while connection.recv():
        started, cpu = time.perf_counter(), time.process_time()
        sample = euler(predict, x, linear_sigmas(subject.steps), prompt)
        connection.send((time.perf_counter() - started, time.process_time() - cpu, first, sample.numpy()))


def plain(stack: ExitStack, subject: Subject, path: Path, device: str, compiled: bool) -> Callable[[], Run]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=plain_process, args=(subject, path, device, compiled, theirs))
    process.start()
    stack.callback(process.join)
    stack.callback(ours.send, False)

    def run() -> Run:
        ours.send(True)
        seconds, cpu, first, sample = ours.recv()
        return Run(seconds, cpu, first, torch.from_numpy(sample))

    return run


def ranks(
    stack: ExitStack, subject: Subject, path: Path, devices: tuple[str, ...], compiled: bool, bands: int
) -> Callable[[], Run]:
    """Ours: a stage on each device."""
    pool = stack.enter_context(closing(Pool(devices, threads=1)))
    model = on_ranks(
        pool, subject.opened(path), Degrees(pipe=len(devices)), subject.dtype, "auto", lambda: None, compile=compiled
    )
    x, prompt = subject.problem_of_ranks()

    def sample(sigmas: torch.Tensor) -> torch.Tensor:
        if bands:
            return sample_in_bands(model, x, sigmas, prompt, bands, warm_up=1)[0]
        return sample_whole(model, x, sigmas, prompt)

    started = time.perf_counter()
    sample(linear_sigmas(measuring.REHEARSAL))
    first = time.perf_counter() - started

    def run() -> Run:
        watch, started = measuring.Watch(pool.whole.ranks.pids), time.perf_counter()
        latent = sample(linear_sigmas(subject.steps))
        return Run(time.perf_counter() - started, sum(watch.cpu_seconds()), first, latent)

    return run


def measure(subject: Subject, devices: tuple[str, ...], rounds: int) -> dict[str, list[Run]]:
    say = measuring.TimedLog()
    with subject.saved() as path, ExitStack() as stack:
        subject.for_others(path)
        make: dict[str, Callable[[], Callable[[], Run]]] = {}
        for compiled in (False, True):
            how = "compiled" if compiled else "eager"
            make[f"diffusers {how}"] = functools.partial(plain, stack, subject, path, devices[0], compiled)
            make[f"one rank {how}"] = functools.partial(ranks, stack, subject, path, devices[:1], compiled, 0)
            if len(devices) > 1:
                name = f"pipefusion 2 stages, {BANDS} patches, {how}"
                make[name] = functools.partial(ranks, stack, subject, path, devices, compiled, BANDS)
        cases = {}
        for name, prepare in make.items():
            cases[name] = prepare()
            say(f"ready: {name}")
        runs: dict[str, list[Run]] = {name: [] for name in cases}
        for turn in range(rounds):
            for name, case in cases.items():
                runs[name].append(case())
                last = runs[name][-1]
                say(f"round {turn + 1}/{rounds}  {name:42} {last.seconds:8.2f} s, CPU {last.cpu:8.2f} s")
        return runs


def summary(subject: Subject, devices: tuple[str, ...], runs: dict[str, list[Run]]) -> dict:
    rows = {}
    for name, done in runs.items():
        eager = runs[name.replace("compiled", "eager")]
        rows[name] = {
            "median_seconds": round(statistics.median(run.seconds for run in done), 3),
            "spread_seconds": [round(min(run.seconds for run in done), 3), round(max(run.seconds for run in done), 3)],
            "cpu_seconds": round(statistics.median(run.cpu for run in done), 3),
            "first_run_of_2_steps_seconds": round(done[0].first, 1),
        }
        if eager is not done:
            rows[name] |= {
                "speed_up": round(statistics.median(a.seconds / b.seconds for a, b in zip(eager, done, strict=True)), 3),
                "speed_up_cpu_seconds": round(statistics.median(a.cpu / b.cpu for a, b in zip(eager, done, strict=True)), 3),
                "relative_difference_to_eager": float(f"{mini.relative(done[0].sample, eager[0].sample):.2g}"),
            }
    ratio = [a.seconds / b.seconds for a, b in zip(runs["one rank compiled"], runs["diffusers compiled"], strict=True)]
    rows["one rank compiled"]["time_over_diffusers_compiled"] = round(statistics.median(ratio), 3)
    head = measuring.head("compile", subject, len(runs["one rank eager"]), devices=devices)
    return head | {"cases": rows}


def main() -> None:
    options = measuring.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    subject, devices = choose_subject(options.steps)
    measuring.report(summary(subject, devices, measure(subject, devices, options.rounds)), options.out)


if __name__ == "__main__":
    main()
