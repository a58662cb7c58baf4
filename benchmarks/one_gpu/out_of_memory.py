"""A GPU that another program fills while a model is on its rank: the error that a call ends with, and the next call.

python -m benchmarks.one_gpu.out_of_memory --out out_of_memory.json
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from testing import mini
from testing.models import on_ranks

from .kept import keep, parser

LEFT = 64 << 20
"""Bytes that are left free of the GPU."""
SIDE = 1024
"""Rows and columns of the latent: its hidden states are larger than what is left."""


def call(pool: Pool, file: Path, side: int) -> dict[str, Any]:
    """The call's seconds, and its error, if it has one."""
    began = time.perf_counter()
    try:
        model = on_ranks(pool, mini.opened(file), Degrees(), "bf16", "sdpa", lambda: None)
        x, timestep, tensors = mini.inputs(batch=1, height=side, width=side)
        model.predict(ModelCall(x, timestep, tensors), lambda: None)
        error = None
    except RuntimeError as failed:
        error = f"{type(failed).__name__}: {failed}"[:500]
    return {"seconds": round(time.perf_counter() - began, 2), "error": error}


def main() -> None:
    out = parser(__doc__).parse_args().out
    result: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "flux.safetensors"
        mini.save(mini.random_model(), file)
        pool = Pool(("cuda:0",), threads=1)
        try:
            result["before"] = call(pool, file, 16)
            filled = torch.empty(max(0, torch.cuda.mem_get_info()[0] - LEFT), dtype=torch.uint8, device="cuda")
            result["full"] = call(pool, file, SIDE)
            del filled
            torch.cuda.empty_cache()
            if pool.error is not None:  # as the registry does at the next use
                pool = Pool(("cuda:0",), threads=1)
            result["after"] = call(pool, file, 16)
        finally:
            pool.close()
    said = "a named error" if result["full"]["error"] else "no error"
    after = "works" if result["after"]["error"] is None else "fails"
    keep(out, {"summary": f"{said} on a full GPU; the next call {after}", **result})


if __name__ == "__main__":
    main()
