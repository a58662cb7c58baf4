"""Memory and seconds of loading one checkpoint on four ranks: each its own part, against the whole on each.

    python -m benchmarks.speed.loading --gigabytes 2 --rounds 2 --out benchmarks/results/loading_NAME_DATE.json

Ranks run already and have loaded a small model before, so what they import does not count. `anonymous`: the highest sum over
the ranks of memory that is theirs alone and that the system cannot take back, above what they had. `unique`: the same with
pages of the mapped file that one rank alone has touched, which the system takes back when it needs them.
"""

import argparse
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import psutil

from benchmarks.harness import measuring
from benchmarks.harness.subjects import FLUX_LIKE, FLUX_SCHNELL, Subject
from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from parallel_backend.wire.lifecycle import Unload, Unloaded

RANKS = 4
MODES = {
    "pipefusion 4": Degrees(pipe=RANKS),
    "tensor 4": Degrees(tensor=RANKS),
    "pipefusion 2 x tensor 2": Degrees(pipe=2, tensor=2),
    "the whole on each (ulysses 4)": Degrees(ulysses=RANKS),
}
INTERVAL = 0.05  # seconds between looks


def large(gigabytes: float) -> Subject:
    """Flux with 7 of its 24 heads and as many single blocks as it takes; a double block has 2.4 times as much."""
    subject = FLUX_SCHNELL.at(heads=7)
    hidden = subject.width
    singles = round(gigabytes * 1e9 / (15 * hidden**2 * 4)) - 10
    return replace(
        subject,
        name="Flux-like",
        config=subject.config | {"num_layers": 4, "num_single_layers": max(1, singles), "joint_attention_dim": 64},
        reduced="",
    )


def memory(pids: tuple[int, ...]) -> tuple[int, int]:
    """(anonymous, unique) bytes of these processes together."""
    anonymous = 0
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        anonymous += 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])
    return anonymous, sum(psutil.Process(pid).memory_full_info().uss for pid in pids)


class Peak:
    """The highest `memory` of the ranks while the context lasts, above that at its start."""

    def __init__(self, pids: tuple[int, ...]):
        self.pids, self.before = pids, memory(pids)
        self.highest = self.before
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._done.wait(INTERVAL):
            self.highest = tuple(map(max, self.highest, memory(self.pids)))

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.highest = tuple(map(max, self.highest, memory(self.pids)))

    @property
    def extra(self) -> tuple[int, ...]:
        return tuple(now - before for now, before in zip(self.highest, self.before, strict=True))


def measure(pool: Pool, path: Path, size: int, degrees: Degrees) -> dict[str, float]:
    pool.ask(Unload(), Unloaded).result(timeout=120)
    with Peak(pool.pids) as peak:
        started = time.perf_counter()
        model = RemoteTransformer(pool, open_checkpoint(path), degrees, "fp32", "sdpa", lambda: None)
        seconds = time.perf_counter() - started
    anonymous, unique = peak.extra
    return {
        "seconds": seconds,
        "anonymous": anonymous / size,
        "unique": unique / size,
        "weights": sum(model.weight_bytes) / size,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gigabytes", type=float, default=2.0)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in MODES}
    with tempfile.TemporaryDirectory() as directory:
        subject = large(given.gigabytes)
        path, small = (Path(directory) / name for name in ("large", "small"))
        path.mkdir()
        small.mkdir()
        size = subject.bytes(subject.save(path))
        pool = Pool(("cpu",) * RANKS, threads=1)
        try:
            pool.ready.result()
            RemoteTransformer(pool, open_checkpoint(FLUX_LIKE.save(small)), MODES["tensor 4"], "fp32", "sdpa", lambda: None)
            for turn in range(given.rounds):
                for name, degrees in MODES.items():
                    found[name].append(measure(pool, path, size, degrees))
                    print(f"round {turn + 1}/{given.rounds}  {name:32} {found[name][-1]}", flush=True)
        finally:
            pool.close()
    result = {
        "date": date.today().isoformat(),
        "hardware": measuring.hardware(),
        "rounds": given.rounds,
        "model": f"{subject}; a file of {size / 1e9:.2f} GB, in the page cache",
        "figures": "memory and weights as multiples of the file, over all ranks; highest and median of the rounds",
        "modes": {
            name: {
                "seconds": round(statistics.median(run["seconds"] for run in runs), 2),
                **{key: round(max(run[key] for run in runs), 3) for key in ("anonymous", "unique", "weights")},
            }
            for name, runs in found.items()
        },
    }
    measuring.report(result, given.out)


if __name__ == "__main__":
    main()
