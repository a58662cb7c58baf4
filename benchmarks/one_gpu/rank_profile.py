"""Where a rank's host spends a call's time: cProfile of the micro-steps of one rank, blocks of published models' sizes.

python -m benchmarks.one_gpu.rank_profile --out profile.json
"""

import contextlib
import cProfile
import functools
import io
import pstats
import time
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.speed.one_gpu_native import CASES, DEVICE, Case, fill
from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.local import LocalRanks
from parallel_backend.processes.pool import Pool
from parallel_backend.wire.rank_settings import RankSettings
from testing.models import on_ranks

from .kept import keep, parser

WARM_UP, CALLS, LINES = 3, 10, 30


def main_of_rank(file: Path, settings: RankSettings, connection: Connection) -> None:
    """A rank's entry, as entry.main. Writes the profile of the micro-steps behind the first WARM_UP to `file`."""
    from parallel_backend.rank import engine
    from parallel_backend.rank.start import entry

    profile, step, count = cProfile.Profile(), engine.Engine.step, [0]

    def profiled(self: engine.Engine, *given: Any) -> Any:
        count[0] += 1
        if count[0] <= WARM_UP:
            return step(self, *given)
        profile.enable()
        try:
            return step(self, *given)
        finally:
            profile.disable()

    engine.Engine.step = profiled
    entry.main(settings, connection)
    profile.dump_stats(file)


def profile_of(case: Case, folder: Path) -> dict[str, Any]:
    """Milliseconds of a call without a profile, and the profile's lines by their own time."""
    real = case.real
    path, stats = fill(real, folder / f"{case.name}.safetensors"), folder / "stats"
    noise, tensors = real.noise(), real.tensors()
    call = ModelCall(noise, torch.full((real.entries,), real.timestep), tensors)
    found: dict[str, Any] = {"blocks": case.depths}
    for name, start in {
        "without": {},
        "with": {"start": functools.partial(LocalRanks, entry=functools.partial(main_of_rank, stats))},
    }.items():
        with contextlib.closing(Pool((DEVICE,), **start)) as pool:
            model = on_ranks(pool, real.opened(path), Degrees(), "bf16", "sdpa", lambda: None)
            for turn in range(WARM_UP + CALLS):
                if turn == WARM_UP:
                    began = time.perf_counter()
                model.predict(call, lambda: None)
            found[f"call_ms_{name}_profile"] = round((time.perf_counter() - began) / CALLS * 1e3, 2)
    text = io.StringIO()
    read = pstats.Stats(str(stats), stream=text).strip_dirs()
    found["host_ms"] = round(read.total_tt / CALLS * 1e3, 2)
    read.sort_stats("tottime").print_stats(LINES)
    path.unlink()
    return found | {"profile": [line.strip() for line in text.getvalue().splitlines() if line.strip()]}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", type=lambda text: text.split(","), default=["flux-dev"])
    given = options.parse_args()
    rows: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        for name in given.cases:
            rows[name] = profile_of(CASES[name], Path(folder))
            said = ", ".join(f"{each} {row['call_ms_without_profile']} ms a call" for each, row in rows.items())
            keep(given.out, {"summary": said, "cases": rows})


if __name__ == "__main__":
    main()
