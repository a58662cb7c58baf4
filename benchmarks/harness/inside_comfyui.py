"""Steps of KSampler with ComfyUI's own MODEL and with ours, in one ComfyUI. ComfyUI's Python runs it for one_rank_native.py.

Arguments: those of testing/comfyui/inside/boot.py. Each line of standard input asks for a measurement, as JSON: see
`measure`. A line of standard output has what came of it. All else that is printed goes to standard error.
"""

import itertools
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

REPLIES = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "testing" / "comfyui" / "inside"))

import boot  # noqa: E402
import psutil  # noqa: E402
from boot import BASE, comfy, torch  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def native(file: str, dtype: str) -> Any:
    """ComfyUI's MODEL, computed in `dtype`, which for bf16 a ComfyUI on a CPU would not do by itself."""
    path = str(BASE / "models" / "diffusion_models" / file)
    with ExitStack() as stack:
        if dtype == "bf16":
            stack.enter_context(patch.object(comfy.model_management, "unet_manual_cast", lambda *_, **__: None))
        return comfy.sd.load_diffusion_model(path, model_options={"dtype": DTYPES[dtype]})


def cpu_seconds() -> float:
    """Of this process and of the rank."""
    processes = (psutil.Process(), *psutil.Process().children(recursive=True))
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def machine_seconds() -> float:
    """CPU seconds that all processes of this machine have had."""
    times = psutil.cpu_times()
    return sum(times) - sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))


def sample(model: Any, call: dict[str, Any], steps: int) -> tuple[tuple[float, float], torch.Tensor]:
    """((seconds of a step, its CPU seconds), samples).

    A step is what lies between two of the sampler's callbacks: its arithmetic and a call of the model. Median and mean.
    """
    g = torch.Generator().manual_seed(0)
    extras = {"pooled_output": torch.randn(1, call["pooled"], generator=g)} if call["pooled"] else {}
    prompt = [[torch.randn(1, *call["text"], generator=g), extras]]
    noise, seen = torch.randn(1, *call["latent"], generator=g), []

    def note(*_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seen.append((time.perf_counter(), cpu_seconds()))

    samples = comfy.sample.sample(
        model,
        noise,
        steps,
        1.0,
        "euler",
        "simple",
        prompt,
        prompt,
        torch.zeros_like(noise),
        callback=note,
        disable_pbar=True,
        seed=0,
    )
    seconds = [now - before for (before, _), (now, _) in itertools.pairwise(seen)]
    return (statistics.median(seconds), (seen[-1][1] - seen[0][1]) / len(seconds)), samples


@torch.inference_mode()
def measure(file: str, dtype: str, call: dict[str, Any], steps: int, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """By model, each round's `sample`; the samples' relative difference; the share of all cores that other processes had."""
    models = {"native": native(file, dtype), "rank": boot.node("ParallelDiTLoader", file, dtype, 1, 1, 1, device)}
    cases = {name: partial(sample, model, call) for name, model in models.items()}
    for case in cases.values():
        case(2)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    last, began, machine, own = {}, time.perf_counter(), machine_seconds(), cpu_seconds()
    for turn in range(rounds):
        for name in sorted(cases, reverse=bool(turn % 2)):  # each comes first as often as the other
            figures, last[name] = cases[name](steps)
            found[name].append(figures)
    cores = (time.perf_counter() - began) * (os.cpu_count() or 1)
    others = (machine_seconds() - machine - (cpu_seconds() - own)) / cores
    difference = float((last["rank"] - last["native"]).norm() / last["native"].norm())
    return found | {"difference": difference, "beside": others}


def main() -> None:
    torch.set_num_threads(1)
    boot.load_pack(boot.PACK)
    from parallel_backend.client.registry import registry

    registry().threads = 1
    for line in sys.stdin:
        print(json.dumps(measure(**json.loads(line))), file=REPLIES, flush=True)


if __name__ == "__main__":
    main()
