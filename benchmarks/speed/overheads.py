"""What is not computing: the cost of a request, of the client between two micro-steps, and of a second prompt's start.

A model so small that its own time hardly counts stands for the model, and what its ranks computed is taken off. All
points in time are of `time.perf_counter`, which is one clock for the processes of a machine.
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
from benchmarks.harness.measuring import figure
from benchmarks.harness.pools import Pools
from benchmarks.harness.subjects import FLUX_LIKE, Subject
from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.proven_class import tensors_of
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from parallel_backend.wire.diagnosis import Timeline
from parallel_backend.wire.timeline_kinds import WORK
from testing.models import on_ranks

CALLS = 200
PROMPTS = 12
LIMITS_MS = {"request": 5.0, "client hop": 0.5, "second prompt": 50.0}
TINY = replace(
    FLUX_LIKE,
    name="Flux of one block of each kind",
    config=FLUX_LIKE.config | {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2},
    side=16,
    text=4,
)
DEGREES = {"one rank": Degrees(), "pipefusion": Degrees(pipe=2), "ulysses": Degrees(ulysses=2), "tensor": Degrees(tensor=2)}


def work(timeline: Timeline) -> torch.Tensor:
    """[n, 2]: start and stop of each micro-step of a rank, in order."""
    spans = timeline.times[timeline.labels[:, 0] == WORK]
    return spans[spans[:, 0].argsort()]


def request_ms(model: RemoteTransformer, subject: Subject, calls: int) -> list[float]:
    """Of each whole call: its time at the client, less the time from the first rank's start to the last one's stop."""
    x, prompt = subject.problem_of_ranks()
    sample_whole(model, x, linear_sigmas(3), prompt)
    model.begin_timeline()
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        model.predict(ModelCall(x, torch.ones(1), prompt.tensors()), lambda: None)
        times.append(time.perf_counter() - started)
    spans = [work(timeline) for timeline in model.timeline(lambda: None)]
    began = torch.stack([span[:, 0] for span in spans]).amin(0)
    ended = torch.stack([span[:, 1] for span in spans]).amax(0)
    return (1000 * (torch.tensor(times, dtype=torch.float64) - (ended - began))).tolist()


def hop_ms(model: RemoteTransformer, subject: Subject, calls: int, bands: int) -> list[float]:
    """From the last stage's end of a micro-step to the first stage's start of the next: the output's way to the client,
    the sampler, the next micro-step's way back. One micro-step is under way at a time, so nothing else is waited for."""
    x, prompt = subject.problem_of_ranks()
    sigmas = linear_sigmas(calls)
    model.begin_timeline()
    if bands:
        sample_in_bands(model, x, sigmas, prompt, bands, warm_up=1)
    else:
        sample_whole(model, x, sigmas, prompt)
    timelines = [work(timeline) for timeline in model.timeline(lambda: None)]
    return (1000 * (timelines[0][1:, 0] - timelines[-1][:-1, 1])).tolist()


def second_prompt_ms(model: RemoteTransformer, subject: Subject, prompts: int, bands: int) -> list[float]:
    """From the start of a sampling run with another prompt to the start of its first micro-step on a rank."""
    x, prompt = subject.problem()
    found = []
    for number in range(prompts):
        tensors = tensors_of({name: tensor + number for name, tensor in prompt.positive.items()})
        model.begin_timeline()
        started = time.perf_counter()
        sample_in_bands(model, x, linear_sigmas(2), Prompt(tensors, {}, 1.0), bands, warm_up=1)
        first = min(work(timeline)[0, 0].item() for timeline in model.timeline(lambda: None))
        found.append(1000 * (first - started))
    return found


def _figures(values: list[float], limit: float) -> dict:
    """Milliseconds, and the limit that the median is held against."""
    ordered = sorted(values)
    return {
        "median_ms": round(statistics.median(ordered), 3),
        "p90_ms": round(ordered[int(0.9 * (len(ordered) - 1))], 3),
        "most_ms": round(ordered[-1], 3),
        "limit_ms": limit,
        "within": statistics.median(ordered) < limit,
    }


def run(
    rounds: int,
    say: Callable[[str], None],
    subject: Subject = TINY,
    larger: Subject = FLUX_LIKE,
    calls: int = CALLS,
    prompts: int = PROMPTS,
    pools: Callable[[int], Pool] | None = None,
) -> dict:
    """The result. `subject`: the tiny model; `larger`: the one on which a second prompt starts."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}

    def note(name: str, values: list[float]) -> None:
        found.setdefault(name, []).extend(values)
        say(f"{name:40} {statistics.median(values):8.3f} ms")

    with TemporaryDirectory() as directory, ExitStack() as stack:
        checkpoints = {}
        for name, made in (("tiny", subject), ("larger", larger)):
            (folder := Path(directory) / name).mkdir()
            checkpoints[name] = made.opened(made.save(folder))
        pools = pools or stack.enter_context(Pools())

        def load(checkpoint: Checkpoint, degrees: Degrees) -> RemoteTransformer:
            return on_ranks(pools(degrees.world), checkpoint, degrees, "fp32", "auto", lambda: None)

        for _ in range(rounds):
            for name, degrees in DEGREES.items():
                model = load(checkpoints["tiny"], degrees)
                note(f"request, {name}", request_ms(model, subject, calls))
                if name in ("one rank", "pipefusion"):
                    note(f"client hop, {name}, whole calls", hop_ms(model, subject, calls, 0))
                    note(f"client hop, {name}, one band", hop_ms(model, subject, calls, 1))
            model = load(checkpoints["larger"], DEGREES["pipefusion"])
            note("second prompt, pipefusion M=2", second_prompt_ms(model, larger, prompts, 2))
    head = measuring.head("overheads", subject, rounds, scope="what the client and the control channel add to computing")
    return head | {
        "model": f"{subject} (second prompt: {larger})",
        "calls": calls,
        "overheads": {name: _figures(values, LIMITS_MS[name.split(",")[0]]) for name, values in found.items()},
        "rounds_ms": {name: figure([statistics.median(values)])["median"] for name, values in found.items()},
    }
