"""Two to eight ranks of one GPU that talk by NCCL's shared memory or CUDA IPC: products of modes against Gloo's bits, and a
rank that is killed while others wait in NCCL's kernels.

    python -m benchmarks.one_gpu.many_ranks --ranks 4 --how shm --out many.json
    python -m benchmarks.one_gpu.many_ranks --ranks 4 --how shm --device cpu      Gloo against Gloo, without a GPU
"""

import contextlib
import functools
import os
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.local import LocalRanks
from parallel_backend.processes.pool import Pool, RankError
from testing import mini
from testing.models import on_ranks

from . import shared_card
from .kept import keep, parser

CONFIG = mini.CONFIG | {"double_blocks": 1, "single_blocks": 3}
"""A block for each of four stages, a head for each of eight ranks."""
SIZES: dict[str, int] = {"height": 16, "width": 16, "text": 5}
PATCHES: dict[str, Any] = {"patch_mode": "displaced"}
PRODUCTS = {
    4: (
        *(Degrees(**{axis: 4}) for axis in ("ulysses", "ring", "tensor", "pipe")),
        *(Degrees(patch=4, **PATCHES), Degrees(pipe=2, ulysses=2), Degrees(pipe=2, tensor=2), Degrees(ring=2, ulysses=2)),
        *(Degrees(ulysses=2, tensor=2), Degrees(batch=2, pipe=2)),
        Degrees(patch=2, ulysses=2, **PATCHES),
    ),
    8: (
        *(Degrees(pipe=2, ulysses=2, tensor=2), Degrees(pipe=2, ring=2, ulysses=2), Degrees(batch=2, pipe=2, ulysses=2)),
        *(Degrees(pipe=2, ulysses=4), Degrees(tensor=8), Degrees(patch=2, ring=2, ulysses=2, **PATCHES)),
    ),
}
CALLS, WAIT = 10, 150.0


def nothing() -> None:
    """The poll of a caller that never gives up."""


def outputs(model: RemoteTransformer, degrees: Degrees) -> tuple[torch.Tensor, float]:
    """A call's output, with a run's where half of its steps use old keys, and milliseconds of a call."""
    x, timestep, tensors = mini.inputs(CONFIG, **SIZES)
    call = lambda: model.predict(ModelCall(x, timestep, tensors), nothing)  # noqa: E731
    found = call()
    if degrees.pipe > 1 or degrees.displaced:
        prompt = Prompt(tensors, tensors, 1.0)
        found = torch.stack([found, sample_in_bands(model, x, linear_sigmas(5), prompt, degrees.pipe, 2)[0]])
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return found, round((time.perf_counter() - began) / CALLS * 1e3, 2)


def killed(model: RemoteTransformer, pid: int) -> dict[str, Any]:
    """Seconds from the end of one rank to the error of a call of all."""
    x, timestep, tensors = mini.inputs(CONFIG, **SIZES)
    model.predict(ModelCall(x, timestep, tensors), nothing)
    os.kill(pid, signal.SIGKILL)
    began = time.perf_counter()
    try:
        while time.perf_counter() - began < WAIT:
            model.predict(ModelCall(x, timestep, tensors), nothing)
        return {"error": None}
    except RankError as error:
        return {"error_after_s": round(time.perf_counter() - began, 2), "error": str(error)[:300]}


def run(ranks: int, how: str, device: str, folder: Path, out: Path | None) -> None:
    devices, cuda = (device,) * ranks, device != "cpu"
    file = folder / "flux.safetensors"
    mini.save(mini.random_model(CONFIG), file)
    version = ".".join(map(str, shared_card.version())) if cuda else "none: Gloo twice"
    result: dict[str, Any] = {"ranks": ranks, "how": how, "nccl": version, "products": {}}
    products = PRODUCTS[ranks]
    entry = {"start": functools.partial(LocalRanks, entry=functools.partial(shared_card.main, how))} if cuda else {}
    with contextlib.ExitStack() as stack:
        pools = {name: Pool(devices, threads=1, **(entry if name == "nccl" else {})) for name in ("gloo", "nccl")}
        for pool in pools.values():
            stack.callback(pool.close)
        for pool in pools.values():
            pool.ready.result(timeout=WAIT)
        for degrees in products:
            found, ms = {}, {}
            for name, pool in pools.items():
                model = on_ranks(pool, mini.opened(file), degrees, "bf16" if cuda else "fp32", "sdpa", nothing)
                found[name], ms[name] = outputs(model, degrees)
            result["products"][str(degrees)] = {"same": torch.equal(found["gloo"], found["nccl"]), "ms": ms}
            same = sum(each["same"] for each in result["products"].values())
            result["summary"] = f"NCCL {version}, {how}: {same} of {len(products)} products give Gloo's bits"
            keep(out, result)
        result["killed"] = killed(model, pools["nccl"].ranks.pids[-1])
        result["summary"] += f"; error {result['killed'].get('error_after_s', 'never came')} s after a rank was killed"
        keep(out, result)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=4, choices=PRODUCTS)
    options.add_argument("--how", choices=shared_card.HOW, default="shm")
    options.add_argument("--device", choices=("cuda:0", "cpu"), default="cuda:0")
    given = options.parse_args()
    if given.device != "cpu" and (reason := shared_card.lacks()):
        keep(given.out, {"lacks": reason})
        return
    with TemporaryDirectory() as folder:
        run(given.ranks, given.how, given.device, Path(folder), given.out)


if __name__ == "__main__":
    main()
