"""Compiled blocks beside eager ones: diffusers alone, one rank, and two stages of PipeFusion.

    python benchmarks/speed/compile.py --rounds 3 --out benchmarks/results/compile_NAME_DATE.json

On CPUs one thread a rank and fp32, a Flux-like model; where there is a CUDA device, bf16 and blocks of Flux's own size (two
stages where there are two devices). diffusers is compiled by its `compile_repeated_blocks`. Every case has a process of its
own for the whole time, and the first run, in which graphs are made, counts apart. `cpu_seconds` are of the processes that
compute: what a busy machine does not change.
"""

import argparse
import functools
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import common  # noqa: E402
from parallel_backend.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from parallel_backend.client.remote_transformer import RemoteTransformer  # noqa: E402
from parallel_backend.core.degrees import Degrees  # noqa: E402
from parallel_backend.families import FAMILIES  # noqa: E402
from parallel_backend.processes.pool import Pool  # noqa: E402
from parallel_backend.quickstart.sampling import Prompt, euler, linear_sigmas, sample_in_bands, sample_whole  # noqa: E402
from tests.support import tiny  # noqa: E402

GPU = common.CONFIG | {
    "num_layers": 4,
    "num_single_layers": 8,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "axes_dims_rope": (16, 56, 56),
}
"""Blocks as Flux has them."""


@dataclass(frozen=True)
class Problem:
    """What every case computes, on which devices and in which dtype."""

    config: dict
    side: int  # latent rows and columns
    text: int
    dtype: str
    devices: tuple[str, ...]

    def given(self) -> tuple[torch.Tensor, Prompt]:
        x, _, tensors = tiny.inputs(self.config, batch=1, height=self.side, width=self.side, text=self.text)
        return x, Prompt(tensors, {}, 1.0)


def chosen_problem() -> Problem:
    if torch.cuda.is_available():
        return Problem(GPU, 128, 512, "bf16", tuple(f"cuda:{index}" for index in range(min(2, torch.cuda.device_count()))))
    return Problem(common.CONFIG, common.SIDE, common.TEXT, "fp32", ("cpu", "cpu"))


@dataclass(frozen=True)
class Run:
    """`first`: seconds of the first run of two steps, graphs and all. `cpu`: seconds of the computing processes."""

    seconds: float
    cpu: float
    first: float
    sample: torch.Tensor


@torch.inference_mode()
def forward(model: torch.nn.Module, x: torch.Tensor, timestep: torch.Tensor, tensors: dict) -> torch.Tensor:
    """diffusers' own forward, as its pipeline calls it: on the model's device, in its dtype."""
    family, device, dtype = FAMILIES["flux"], model.device, model.dtype
    rows, columns = family.patching.grid(tuple(x.shape))
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(rows).float(), torch.arange(columns).float())
    out = model(
        hidden_states=family.patching.pack(x).to(device, dtype),
        encoder_hidden_states=tensors["context"].to(device, dtype),
        pooled_projections=tensors["pooled"].to(device, dtype),
        timestep=timestep.to(device, dtype),
        img_ids=places.to(device),
        txt_ids=torch.zeros(tensors["context"].shape[1], 3, device=device),
        return_dict=False,
    )[0]
    return family.patching.unpack(out.float().cpu(), tuple(x.shape))


def plain_process(problem: Problem, compiled: bool, steps: int, connection) -> None:
    """Answers every message on the connection with a run of the plain loop."""
    torch.set_num_threads(1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[problem.dtype]
    model = tiny.random_flux(problem.config, dtype=dtype).to(problem.devices[0])
    if compiled:
        model.compile_repeated_blocks(fullgraph=True, dynamic=False)
    x, prompt = problem.given()
    predict = functools.partial(forward, model)
    started = time.perf_counter()
    euler(predict, x, linear_sigmas(common.REHEARSAL), prompt)
    first = time.perf_counter() - started
    while connection.recv():
        started, cpu = time.perf_counter(), time.process_time()
        sample = euler(predict, x, linear_sigmas(steps), prompt)
        connection.send((time.perf_counter() - started, time.process_time() - cpu, first, sample.numpy()))


def plain(stack: ExitStack, problem: Problem, compiled: bool, steps: int) -> Callable[[], Run]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=plain_process, args=(problem, compiled, steps, theirs))
    process.start()
    stack.callback(process.join)
    stack.callback(ours.send, False)

    def run() -> Run:
        ours.send(True)
        seconds, cpu, first, sample = ours.recv()
        return Run(seconds, cpu, first, torch.from_numpy(sample))

    return run


def ranks(stack: ExitStack, problem: Problem, path: Path, compiled: bool, steps: int, bands: int) -> Callable[[], Run]:
    """Ours; with `bands` on two stages."""
    degrees = Degrees(pipe=2 if bands else 1)
    pool = stack.enter_context(closing(Pool(problem.devices[: degrees.world], threads=1)))
    checkpoint = open_checkpoint(path)
    model = RemoteTransformer(pool, checkpoint, degrees, problem.dtype, "auto", lambda: None, compile=compiled)
    x, prompt = problem.given()

    def sample(sigmas: torch.Tensor) -> torch.Tensor:
        if bands:
            return sample_in_bands(model, x, sigmas, prompt, bands, warm_up=1)[0]
        return sample_whole(model, x, sigmas, prompt)

    def cpu() -> float:
        times = [psutil.Process(pid).cpu_times() for pid in pool.pids]
        return sum(time.user + time.system for time in times)

    started = time.perf_counter()
    sample(linear_sigmas(common.REHEARSAL))
    first = time.perf_counter() - started

    def run() -> Run:
        started, before = time.perf_counter(), cpu()
        latent = sample(linear_sigmas(steps))
        return Run(time.perf_counter() - started, cpu() - before, first, latent)

    return run


def measure(problem: Problem, steps: int, rounds: int) -> dict[str, list[Run]]:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = tiny.random_flux(problem.config)
        path = tiny.save_original(model, problem.config, Path(directory) / "flux-like.safetensors")
        del model
        make: dict[str, Callable[[], Callable[[], Run]]] = {}
        for compiled in (False, True):
            how = "compiled" if compiled else "eager"
            make[f"diffusers {how}"] = functools.partial(plain, stack, problem, compiled, steps)
            make[f"one rank {how}"] = functools.partial(ranks, stack, problem, path, compiled, steps, 0)
            if len(problem.devices) > 1:
                make[f"pipefusion 2 stages, 4 patches, {how}"] = functools.partial(
                    ranks, stack, problem, path, compiled, steps, 4
                )
        cases = {}
        for name, prepare in make.items():
            cases[name] = prepare()
            print(f"ready: {name}", flush=True)
        runs: dict[str, list[Run]] = {name: [] for name in cases}
        for turn in range(rounds):
            for name, case in cases.items():
                runs[name].append(case())
                last = runs[name][-1]
                print(f"round {turn + 1}/{rounds}  {name:42} {last.seconds:8.2f} s, CPU {last.cpu:8.2f} s", flush=True)
        return runs


def summary(problem: Problem, steps: int, runs: dict[str, list[Run]]) -> dict:
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
                "relative_difference_to_eager": float(f"{tiny.relative(done[0].sample, eager[0].sample):.2g}"),
            }
    ratio = [a.seconds / b.seconds for a, b in zip(runs["one rank compiled"], runs["diffusers compiled"], strict=True)]
    rows["one rank compiled"]["time_over_diffusers_compiled"] = round(statistics.median(ratio), 3)
    config = problem.config
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    return common.head(steps, {"": [None] * len(runs["one rank eager"])}) | {
        "hardware": torch.cuda.get_device_name() if problem.devices[0] != "cpu" else common.hardware(),
        "model": f"Flux-like, random weights, hidden {hidden}, {config['num_layers']} + {config['num_single_layers']} "
        f"blocks, {problem.side**2 // 4} image + {problem.text} text tokens, {problem.dtype}",
        "cases": rows,
    }


def main() -> None:
    options: argparse.Namespace = common.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    problem = chosen_problem()
    runs = measure(problem, options.steps, options.rounds)
    common.report(summary(problem, options.steps, runs), options.out)


if __name__ == "__main__":
    main()
