"""Which calls of a second thread the driver holds up while the first one launches a kernel for the first time, allocates,
frees or page-locks memory behind a long queue.

    python -m benchmarks.one_gpu.lock_probe --out lock_probe.json

A call that waits for longer than SHORT_MS may not be made by a thread whose silence ends ranks.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from .kept import keep, parser

QUEUE_SECONDS, PAUSE, SHORT_MS = 1.5, 0.02, 50.0
DEVICE = "cuda:0"
BF16 = {"device": DEVICE, "dtype": torch.bfloat16}


def first_launches(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Kernels that this process has not launched before."""
    heads = lambda: [torch.ones(1, 24, 4096, 128, **BF16)] * 3  # noqa: E731
    return {
        "first launch, bessel_j0": lambda: torch.special.bessel_j0(x),
        "first launch, gemm": lambda: torch.ones(4096, 3072, **BF16) @ torch.ones(3072, 64, **BF16),
        "first launch, attention": lambda: torch.nn.functional.scaled_dot_product_attention(*heads()),
        "first launch, conv3d": lambda: torch.nn.functional.conv3d(
            torch.ones(1, 16, 5, 32, 32, device=DEVICE), torch.ones(16, 16, 3, 3, 3, device=DEVICE)
        ),
    }


def other_work(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    host = torch.ones(1 << 30, dtype=torch.uint8)
    cuda = torch.cuda.cudart()

    def register() -> None:
        cuda.cudaHostRegister(host.data_ptr(), host.nbytes, 0)
        cuda.cudaHostUnregister(host.data_ptr())

    return {
        "known kernel": lambda: x.add_(1),
        "allocating 2 GB": lambda: torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE),
        "freeing 2 GB": torch.cuda.empty_cache,
        "cudaHostAlloc of 1 GB": lambda: torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True),
        "cudaHostRegister of 1 GB": register,
    }


def longest(asked: dict[str, Callable[[], Any]], work: Callable[[], Any], queue: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds that `work` took behind the queue, and the longest that each of the calls took meanwhile."""
    stop, found = threading.Event(), dict.fromkeys(asked, 0.0)

    def ask(name: str) -> None:
        torch.cuda.set_device(DEVICE)
        while not stop.is_set():
            began = time.perf_counter()
            asked[name]()
            found[name] = max(found[name], time.perf_counter() - began)
            time.sleep(PAUSE)

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in asked]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    found.update(dict.fromkeys(asked, 0.0))
    queue()
    began = time.perf_counter()
    work()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    stop.set()
    for thread in threads:
        thread.join()
    return {"work_ms": round(took * 1e3, 1), "longest_ms": {name: round(value * 1e3, 1) for name, value in found.items()}}


def main() -> None:
    out = parser(__doc__).parse_args().out
    torch.cuda.set_device(DEVICE)
    x = torch.ones(1 << 20, device=DEVICE)
    event, side = torch.cuda.Event(), torch.cuda.Stream()
    event.record()
    began = time.perf_counter()
    torch.cuda._sleep(10**9)
    torch.cuda.synchronize()
    cycles = int(QUEUE_SECONDS / (time.perf_counter() - began) * 1e9)

    def queued() -> None:
        torch.cuda._sleep(cycles)

    def beside() -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(cycles)

    asked = {"event.query": event.query, "mem_get_info": lambda: torch.cuda.mem_get_info(DEVICE), "no call": lambda: None}
    rows: dict[str, Any] = {}
    for where, queue, works in (
        ("queue of its stream", queued, first_launches(x) | other_work(x)),
        ("spinning kernel of another stream", beside, other_work(x)),
    ):
        for name, work in works.items():
            rows[f"{name}, behind a {where}"] = longest(asked, work, queue)
            waits = sorted({call for row in rows.values() for call, ms in row["longest_ms"].items() if ms > SHORT_MS})
            worst = max(ms for row in rows.values() for ms in row["longest_ms"].values())
            keep(out, {"summary": f"longest wait {worst:.0f} ms; calls that wait: {waits or 'none'}", "rows": rows})


if __name__ == "__main__":
    main()
