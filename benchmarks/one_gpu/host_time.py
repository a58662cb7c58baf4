"""Milliseconds of the host that a step takes on one rank of each mode, with the launches of a real device.

    python -m benchmarks.one_gpu.host_time --out host_time.json
    python -m benchmarks.one_gpu.host_time --device cpu --modes 'one;ulysses'

Flux's 57 blocks, narrow, so that the device waits for the host. The messages of a run on CPU ranks in threads are handled
once more by a worker whose process group is torch's fake one: transfers take no time and move nothing. On a CPU the
arithmetic is in the figures, too, on one thread. A rank of a pipeline has the first 28 blocks, 19 of them with two streams.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from parallel_backend.rank.comm.mesh import make_mesh
from parallel_backend.rank.worker import Worker
from parallel_backend.wire import messages as m
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.rank_settings import RankSettings
from testing import mini
from testing.models import on_ranks
from testing.thread_ranks import thread_ranks

from .kept import keep, parser

CONFIG = mini.CONFIG | {"double_blocks": 19, "single_blocks": 38, "width": 64}
MODES = {
    "one": (Degrees(), 0),
    "ulysses": (Degrees(ulysses=2), 0),
    "ring": (Degrees(ring=2), 0),
    "tensor": (Degrees(tensor=2), 0),
    "pipe, 2 bands": (Degrees(pipe=2), 2),
    "pipe, 4 bands": (Degrees(pipe=2), 4),
    "patches": (Degrees(patch=2, patch_mode="displaced"), 1),
}
"""Mode -> its degrees, and PipeFusion's bands; 0: whole calls."""
STEPS, ROUNDS = 6, 12
REPEATED = (m.Load, m.PutConditioning, m.OpenRun, m.Step)


class Silent:
    """A channel that takes all replies."""

    def send(self, *_: Any, **__: Any) -> None:
        """Drops the message."""


class FakePeers:
    """Stands in for Peers: the mesh is of torch's fake group, and nothing is tried."""

    def __init__(self, place: int, world: int):
        self.place, self._world = place, world

    def part(self, ranks: tuple[int, ...]) -> "FakePeers":
        return self

    def enter_mesh(self, degrees: Degrees) -> Any:
        return make_mesh(degrees, self.place, timedelta(minutes=1))

    def leave_mesh(self, degrees: Degrees) -> None:
        """The group ends with its world."""

    def tell_all(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers)] * self._world

    def blocked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def recorded(checkpoint: Checkpoint, call: mini.Call, degrees: Degrees, bands: int, **setup: Any) -> list[Any]:
    """The messages of a run to the first rank. `setup`: further fields of Setup."""
    log, handle = [], Worker._handle

    def logged(worker: Worker, message: Any) -> None:
        if worker.settings.rank == 0 and isinstance(message, REPEATED):
            log.append(message)
        handle(worker, message)

    x, timestep, tensors = call
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(thread_ranks())
        stack.enter_context(mock.patch.object(Worker, "_handle", logged))
        pool = stack.enter_context(contextlib.closing(Pool(("cpu",) * degrees.world, threads=1, start=start, silence=600.0)))
        model = on_ranks(pool, checkpoint, degrees, "fp32", "sdpa", lambda: None, **setup)
        if bands:
            sample_in_bands(model, x, linear_sigmas(STEPS), Prompt(tensors, tensors, 1.0), bands, 1)
        else:
            for step in range(STEPS):
                model.predict(ModelCall(x, timestep * (1 - step / STEPS), tensors), lambda: None)
    return log


def replayed(log: list[Any], degrees: Degrees, device: str) -> dict[str, float]:
    """Milliseconds of the main thread, and of the clock, for a step."""
    settings = RankSettings((device,) * degrees.world, 1, timedelta(minutes=1), rank=0, rendezvous=Path("nowhere"))
    if degrees.world > 1:
        dist.init_process_group("fake", rank=0, world_size=degrees.world, store=FakeStore())
    try:
        worker: Any = Worker(settings, Silent(), Heartbeat(), FakePeers(0, degrees.world))  # type: ignore[arg-type]
        synchronize = torch.cuda.synchronize if device != "cpu" else lambda: None

        def run(messages: list[Any]) -> tuple[float, float]:
            synchronize()
            began, cpu = time.perf_counter(), time.thread_time()
            for message in messages:
                worker._handle(message)
            host = time.thread_time() - cpu
            synchronize()
            return host, time.perf_counter() - began

        dtype = "fp32" if device == "cpu" else "bf16"
        run([replace(each, setup=replace(each.setup, dtype=dtype)) if isinstance(each, m.Load) else each for each in log])
        steps = [each for each in log if isinstance(each, m.Step)]
        times = [run(steps) for _ in range(ROUNDS)]
        worker._outbox.close()
    finally:
        if degrees.world > 1:
            dist.destroy_process_group()
    host, whole = (min(column) / STEPS * 1e3 for column in zip(*times, strict=True))
    return {"host_ms": round(host, 1), "ms": round(whole, 1)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", choices=("cuda:0", "cpu"), default="cuda:0")
    options.add_argument("--modes", type=lambda text: text.split(";"), default=list(MODES), help=";".join(MODES))
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # nothing arrives, and arithmetic with what was in memory before may be slow
    rows: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "flux.safetensors"
        mini.save(mini.random_model(CONFIG), file)
        for name in given.modes:
            degrees, bands = MODES[name]
            call = mini.inputs(CONFIG, batch=1, height=8, width=8, text=8)
            rows[name] = replayed(recorded(mini.opened(file), call, degrees, bands), degrees, given.device)
            if "one" in rows:
                rows[name]["of_one_rank"] = round(rows[name]["host_ms"] / rows["one"]["host_ms"], 2)
            said = ", ".join(f"{mode} {row['host_ms']}" for mode, row in rows.items())
            keep(given.out, {"summary": f"host ms a step of 57 blocks: {said}", "modes": rows})


if __name__ == "__main__":
    main()
