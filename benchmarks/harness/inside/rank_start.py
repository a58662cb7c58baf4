"""From loading to the first call's answer, by a family or by ComfyUI's own class, for benchmarks/speed. Run by serve.py."""

import time
from pathlib import Path
from typing import Any

import psutil
from boot import Results, by_own_class, ksampler, parallel, spawned_ranks, torch

from parallel_backend.client.registry import registry


def main(results: Results, file: str, latent: list[int], text: list[int], pooled: int, own: bool) -> None:
    results.case("start", lambda: started(file, latent, text, pooled, own))


def started(file: str, latent: list[int], text: list[int], pooled: int, own: bool) -> dict[str, Any]:
    """Seconds; CPU seconds of this process; by rank, its CPU seconds and bytes of anonymous memory; what the report says of
    a trial. Ranks begin when the file is loaded."""
    extras = {"pooled_output": torch.randn(1, pooled)} if pooled else {}
    prompt = [[torch.randn(1, *text), extras]]
    with spawned_ranks():
        began, cpu = time.perf_counter(), seconds_of(psutil.Process())
        model = by_own_class(parallel, file) if own else parallel(file)
        ksampler(model, (prompt, prompt), torch.zeros(1, *latent), steps=1, cfg=1.0)
        seconds, cpu = time.perf_counter() - began, seconds_of(psutil.Process()) - cpu
    pool = registry().pool
    assert pool is not None
    return {
        "seconds": seconds,
        "client": cpu,
        "rank": [seconds_of(psutil.Process(pid)) for pid in pool.pids],
        "bytes": [anonymous(pid) for pid in pool.pids],
    }


def seconds_of(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def anonymous(pid: int) -> int:
    """Bytes of its anonymous memory."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
