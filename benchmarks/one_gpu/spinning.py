"""Products of matrices beside a receive that spins until its sender comes, on many streams, with 8 and 32 hardware queues.

python -m benchmarks.one_gpu.spinning --out spinning.json
"""

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from . import shared_card
from .kept import keep, parser

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
STREAMS, PRODUCTS, SIDE, DELAY = 12, 240, 2048, 3.0


def measure(number: int) -> dict[str, Any]:
    """Milliseconds of the products alone, beside the receive, and whether they ended before it did."""
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    a, values = torch.ones(SIDE, SIDE, device="cuda", dtype=torch.bfloat16), torch.zeros(1 << 20, device="cuda")

    def products() -> float:
        torch.cuda.current_stream().synchronize()
        began = time.perf_counter()
        for index in range(PRODUCTS):
            with torch.cuda.stream(streams[index % STREAMS]):
                a @ a
        for stream in streams:
            stream.synchronize()
        return (time.perf_counter() - began) * 1e3

    dist.all_reduce(values)
    for turn in range(2):  # the first makes the connection
        torch.cuda.synchronize()
        dist.barrier(device_ids=[0])
        if number == 0:
            time.sleep(DELAY * turn)
            dist.send(values, 1)
            continue
        products()
        alone = products()
        receive = dist.irecv(values, 0)
        assert receive is not None
        time.sleep(0.2 * turn)
        beside = products()
        waiting = not receive.is_completed()
        receive.wait()
    torch.cuda.synchronize()
    if number == 0:
        return {}
    return {"alone_ms": round(alone, 2), "beside_ms": round(beside, 2), "receive_still_waited": waiting}


def main() -> None:
    out = parser(__doc__).parse_args().out
    if reason := shared_card.lacks():
        keep(out, {"lacks": reason})
        return
    rows: dict[str, Any] = {}
    for queues in ("8", "32"):
        os.environ[CONNECTIONS] = queues
        rows[queues] = found = shared_card.two(measure)
        found["ratio"] = round(found["beside_ms"] / found["alone_ms"], 3)
        ratios = ", ".join(f"{name} queues {row['ratio']}x" for name, row in rows.items())
        keep(out, {"summary": f"products beside a waiting receive take: {ratios}", "by_queues": rows})


if __name__ == "__main__":
    main()
