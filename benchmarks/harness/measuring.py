"""One timed run of one competitor, what came of it, and rounds of such runs in turn.

Every round runs each case once, so that a drifting machine hits all alike: figures are medians over rounds, ratios are
taken within a round. A run is timed from its first step to its last, after a rehearsal; loading, text encoder and VAE are
outside unless a result says otherwise.
"""

import argparse
import json
import os
import platform
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import psutil
import torch

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Predict, Prompt, euler, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.wire.sampling import RunStats

from .subjects import Subject

SCOPE = "transformer and sampler loop; no text encoder, VAE or loading"
REHEARSAL = 2
"""Steps before the clock starts: one warm-up step of PipeFusion and one in bands."""


@dataclass(frozen=True)
class Outcome:
    """`seconds`: of the loop, on the slowest rank. By rank: CPU seconds in the loop, bytes of memory at their highest
    (resident set of a CPU rank's process, or of the CUDA device) and of weights. `client_cpu`: of the process that samples.
    """

    seconds: float
    sample: torch.Tensor
    cpu_seconds: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    weight_bytes: tuple[int, ...] = ()
    stats: tuple[RunStats, ...] = ()
    client_cpu: float | None = None
    note: Mapping[str, object] = field(default_factory=dict)


Cases = Mapping[str, Callable[[], Outcome]]
Outcomes = dict[str, list[Outcome]]
"""By case, one for each round."""


class Watch:
    """CPU seconds and highest resident set of processes, from here on. The latter on Linux only, else 0.

    `resident_bytes`: what they had at the start.
    """

    def __init__(self, pids: Sequence[int]):
        self._processes = [psutil.Process(pid) for pid in pids]
        if sys.platform == "linux":
            for pid in pids:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        self.resident_bytes = tuple(process.memory_info().rss for process in self._processes)
        self._before = self._cpu()

    def _cpu(self) -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in self._processes]

    def cpu_seconds(self) -> tuple[float, ...]:
        return tuple(now - before for now, before in zip(self._cpu(), self._before, strict=True))

    def peak_bytes(self) -> tuple[int, ...]:
        if sys.platform != "linux":
            return (0,) * len(self._processes)
        words = [Path(f"/proc/{process.pid}/status").read_text().split() for process in self._processes]
        return tuple(1024 * int(status[status.index("VmHWM:") + 1]) for status in words)


def own_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def run_plain(
    subject: Subject, predict: Predict, pictures: int = 1, start: Callable[[], None] = lambda: None, device: str = "cpu"
) -> Outcome:
    """diffusers' own forward in a plain loop in this process. `start` is called just before the clock starts."""
    finish = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    x, prompt = subject.problem(pictures)
    x = x.to(device)
    entries = ({name: tensor.to(device) for name, tensor in each.items()} for each in (prompt.positive, prompt.negative))
    prompt = Prompt(*entries, prompt.cfg)  # where the model is, as a pipeline has it: no copy is within the clock
    euler(predict, x, linear_sigmas(REHEARSAL), prompt)
    finish()
    start()
    started, cpu = time.perf_counter(), time.process_time()
    sample = euler(predict, x, linear_sigmas(subject.steps), prompt)
    finish()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else own_peak_bytes()
    return Outcome(seconds, sample.cpu(), (cpu,), (peak,))


def run_ranks(model: RemoteTransformer, subject: Subject, pictures: int = 1, bands: int = 0) -> Outcome:
    """Our ranks. `bands`: PipeFusion's patches, 1 for displaced patches; 0 where every call is whole (sampling.py)."""
    x, prompt = subject.problem_of_ranks(pictures)

    def report() -> list[RunStats]:
        return model.close_run(model.open_run(), lambda: None)

    def sample(sigmas: torch.Tensor) -> tuple[torch.Tensor, list[RunStats]]:
        if bands:
            return sample_in_bands(model, x, sigmas, prompt, bands, warm_up=1)
        return sample_whole(model, x, sigmas, prompt), report()

    sample(linear_sigmas(REHEARSAL))
    report()  # what the rehearsal and the loading moved is not this run's
    watch = Watch(model.pool.whole.ranks.pids)
    started, cpu = time.perf_counter(), time.process_time()
    latent, stats = sample(linear_sigmas(subject.steps))
    seconds, client = time.perf_counter() - started, time.process_time() - cpu
    cuda = model.pool.devices[0].startswith("cuda")
    peaks = tuple(rank.peak_bytes for rank in stats) if cuda else watch.peak_bytes()
    return Outcome(seconds, latent, watch.cpu_seconds(), peaks, tuple(model.weight_bytes), tuple(stats), client)


class Stolen:
    """The share of the cores' time, from here on, that the host of a virtual machine gave to others. Linux only, else 0.

    What was stolen is missing to ranks that wait for each other more than to a process that waits for nobody.
    """

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        times = psutil.cpu_times()
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted as the user's time, too
        return getattr(times, "steal", 0.0), sum(times) - guests

    def share(self) -> float:
        (stolen, whole), (stolen_before, whole_before) = self._now(), self._before
        return round((stolen - stolen_before) / max(whole - whole_before, 1e-9), 3)


class TimedLog:
    """Prints a line with the seconds since the log was made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def __call__(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._started:7.0f} s] {text}", flush=True)


def interleave(cases: Cases, rounds: int, say: Callable[[str], None]) -> Outcomes:
    outcomes: Outcomes = {name: [] for name in cases}
    began = time.perf_counter()
    for turn in range(rounds):
        for name, case in cases.items():
            outcomes[name].append(case())
            say(f"round {turn + 1}/{rounds}  {name:28} {outcomes[name][-1].seconds:8.2f} s")
        if turn + 1 < rounds:
            say(f"about {(time.perf_counter() - began) / (turn + 1) * (rounds - turn - 1):.0f} s left of these rounds")
    return outcomes


def seconds(outcomes: list[Outcome]) -> list[float]:
    return [outcome.seconds for outcome in outcomes]


def median(outcomes: list[Outcome], digits: int = 2) -> float:
    return round(statistics.median(seconds(outcomes)), digits)


def spread(outcomes: list[Outcome], digits: int = 2) -> list[float]:
    return [round(bound(seconds(outcomes)), digits) for bound in (min, max)]


def ratios(numerator: list[Outcome], denominator: list[Outcome], factor: float = 1.0) -> list[float]:
    """Of the times, round by round."""
    return [factor * a / b for a, b in zip(seconds(numerator), seconds(denominator), strict=True)]


def figure(values: Sequence[float], digits: int = 3) -> dict[str, float | list[float]]:
    """Median, and all of them."""
    return {"median": round(statistics.median(values), digits), "rounds": [round(value, digits) for value in values]}


def by_rank(outcomes: list[Outcome], name: str, scale: float = 1.0, digits: int = 2) -> list[float]:
    """Median over the rounds of a figure that each rank has."""
    columns = zip(*(getattr(outcome, name) for outcome in outcomes), strict=True)
    return [round(statistics.median(column) / scale, digits) for column in columns]


def moved(outcome: Outcome, steps: int) -> dict[str, float]:
    """MB that left the ranks per step, all together, by mesh axis."""
    axes = sorted({axis for rank in outcome.stats for axis in rank.bytes_sent})
    sent = {axis: sum(rank.bytes_sent.get(axis, 0) for rank in outcome.stats) for axis in axes}
    return {axis: round(count / steps / 1e6, 3) for axis, count in sent.items()}


def row(outcomes: list[Outcome], steps: int) -> dict:
    """What is said of every case."""
    first, said = outcomes[0], {"seconds": figure(seconds(outcomes), 4)}
    if first.cpu_seconds:
        said["cpu_seconds_by_rank"] = by_rank(outcomes, "cpu_seconds")
    if first.client_cpu is not None:
        said["client_cpu_seconds"] = round(statistics.median(outcome.client_cpu for outcome in outcomes), 2)
    if first.peak_bytes:
        said["peak_MB_by_rank"] = by_rank(outcomes, "peak_bytes", 1e6, 0)
    if first.weight_bytes:
        said["weights_MB_by_rank"] = by_rank(outcomes, "weight_bytes", 1e6, 1)
    if first.stats:
        said["sent_MB_per_step"] = moved(first, steps)
        said["waited_seconds_by_rank"] = [round(rank.wait_seconds, 2) for rank in first.stats]
    return said | dict(first.note)


def hardware(devices: Sequence[str] = ("cpu",)) -> str:
    if devices[0].startswith("cuda"):
        return f"{len(devices)} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    return f"{platform.machine()} CPU, {os.cpu_count()} cores, 1 thread per rank, torch {torch.__version__}"


def head(what: str, subject: Subject, rounds: int, scope: str = SCOPE, devices: Sequence[str] = ("cpu",)) -> dict:
    """What a result says first: what was measured, on what, how often."""
    return {
        "what": what,
        "date": date.today().isoformat(),
        "hardware": hardware(devices),
        "model": str(subject),
        "scope": scope,
        "steps": subject.steps,
        "rounds": rounds,
    }


def readable(result: dict) -> str:
    """JSON with a list of numbers on one line."""

    def on_one_line(found: re.Match) -> str:
        return "[" + re.sub(r"\s+", " ", found[1].strip()) + "]"

    return re.sub(r"\[([^\[\]{}\"]*)\]", on_one_line, json.dumps(result, indent=1))


def keep(result: dict, folder: Path, label: str) -> Path:
    """Write a result to WHAT_LABEL_DATE.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['what']}_{label}_{result['date']}.json"
    path.write_text(readable(result) + "\n")
    return path


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of a benchmark that is a command of its own."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--out", type=Path)
    return options


def report(result: dict, out: Path | None) -> None:
    """Print the result and, if asked for, keep it."""
    text = readable(result)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
