"""CUDA graphs with NCCL's all-to-all and sum in them, replayed a hundred times, between two processes of one GPU.

python -m benchmarks.one_gpu.captures --out captures.json
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from . import shared_card
from .kept import keep, parser

REPLAYS, SIZE = 100, 1 << 20


def measure(number: int) -> dict[str, Any]:
    """Replays with wrong values, and milliseconds of a replay and of the same calls."""
    x, weight = torch.zeros(2, SIZE, device="cuda"), torch.eye(1024, device="cuda")
    came, result = torch.empty_like(x), torch.empty_like(x)

    def calls() -> None:
        dist.all_to_all_single(came, (x.view(-1, 1024) @ weight).view_as(x))
        result.copy_(came)
        dist.all_reduce(result)

    for _ in range(3):
        calls()
    torch.cuda.synchronize()
    graph, wrong = torch.cuda.CUDAGraph(), 0
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        calls()
    for turn in range(REPLAYS):
        x.fill_(turn + number)
        graph.replay()
        # Row r comes from process r on both, and their sum is twice that.
        expected = torch.tensor([2.0 * turn, 2.0 * turn + 2.0], device="cuda")[:, None]
        wrong += not torch.equal(result, expected.expand_as(result))
    return {"wrong": wrong, "replay_ms": milliseconds(graph.replay), "calls_ms": milliseconds(calls)}


def milliseconds(action: Callable[[], Any]) -> float:
    """Of one of REPLAYS actions, until the device has done all."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(REPLAYS):
        action()
    torch.cuda.synchronize()
    return round((time.perf_counter() - began) / REPLAYS * 1e3, 3)


def main() -> None:
    out = parser(__doc__).parse_args().out
    if reason := shared_card.lacks():
        keep(out, {"lacks": reason})
        return
    found = shared_card.two(measure)
    ms = f"{found['replay_ms']} ms a replay, {found['calls_ms']} ms by calls"
    summary = f"{found['wrong']} of {REPLAYS} replays wrong; {ms}"
    keep(out, {"summary": summary, **found})


if __name__ == "__main__":
    main()
