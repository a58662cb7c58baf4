"""Memory and seconds of loading one checkpoint on several ranks, in every mode.

    python -m benchmarks.speed.loading --gigabytes 2 --rounds 2 --out benchmarks/results/loading_NAME_DATE.json
    python -m benchmarks.speed.loading --formats fp32,bf16,fp8,int8 --gigabytes 1 --out FILE

With `--formats` files of the same values (`--gigabytes` in fp32) in ComfyUI's formats, what is not quantised in bf16, and
weight_dtype bf16, as on a GPU; one rank, and two that share the model.

Ranks run already and have loaded a small model before, so what they import does not count. `held`: the highest sum over the
ranks and the client, whose place ComfyUI has, of memory that the system cannot take back, above what they had; what ranks
share counts once (testing/host_memory.py). `mapped`: the same of pages of files, which are the page cache's. Ranks are
looked at every 50 ms. `streamed`: the same on emulated devices that have room for three tenths of the file, whose own
bytes are taken off. `host`: weights in host memory, as the ranks count them.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import measuring
from benchmarks.harness.needs import need
from benchmarks.harness.subjects import FLUX_LIKE, FLUX_SCHNELL, WEIGHTS, Subject
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.dtypes import TORCH_DTYPES
from parallel_backend.processes.local import LocalRanks
from parallel_backend.processes.pool import Pool
from parallel_backend.wire.lifecycle import Unload, Unloaded
from testing import mini
from testing.emulated_device import EmulatedDevice, start_with
from testing.host_memory import held_bytes, mapped_bytes
from testing.models import on_ranks

RANKS = 4
MODES = {
    "pipefusion 4": Degrees(pipe=RANKS),
    "tensor 4": Degrees(tensor=RANKS),
    "pipefusion 2 x tensor 2": Degrees(pipe=2, tensor=2),
    "ulysses 4": Degrees(ulysses=RANKS),
    "ring 4": Degrees(ring=RANKS),
    "displaced patches 4": Degrees(patch=RANKS, patch_mode="displaced"),
    "split batch 4": Degrees(batch=RANKS),
    "pipefusion 2 x ulysses 2": Degrees(pipe=2, ulysses=2),
    "ulysses 2 x tensor 2": Degrees(ulysses=2, tensor=2),
}
STREAMED = ("ulysses 4", "split batch 4", "pipefusion 2 x ulysses 2")
ROOM, RATE = 0.3, 1e10
"""Of an emulated device: its bytes as a part of the file's, and bytes a second to it."""
FORMAT_MODES = {"one rank": Degrees(), "pipefusion 2": Degrees(pipe=2), "tensor 2": Degrees(tensor=2)}
FORMATS = {
    "fp32": None,
    "bf16": None,
    "fp8": "fp8",
    "int8": "int8, rotated",
    "nvfp4": "nvfp4",
    "mxfp8": "mxfp8",
    "w4a4": "w4a4",
    "w4a8": "w4a8, no codebook",
}
"""Format -> its name in testing.quantised; None: a plain file."""
INTERVAL = 0.05  # seconds between looks


def large(gigabytes: float, heads: int = 7) -> Subject:
    """Flux with few of its 24 heads and as many single blocks as it takes; a double block has 2.4 times as much."""
    subject = FLUX_SCHNELL.at(heads=heads)
    hidden = subject.width
    singles = round(gigabytes * 1e9 / (15 * hidden**2 * 4)) - 10
    return replace(
        subject,
        name="Flux-like",
        config=subject.config | {"double_blocks": 4, "single_blocks": max(1, singles), "context_width": 64},
        reduced="",
    )


def memory(pids: tuple[int, ...]) -> tuple[int, int]:
    """(held, mapped) bytes of these processes together."""
    return held_bytes(pids), mapped_bytes(pids)


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


def measure(
    pool: Pool, path: Path, size: int, degrees: Degrees, dtype: str = "fp32", emulated: bool = False
) -> dict[str, float]:
    pool.ask(Unload(), Unloaded).result(timeout=120)
    with Peak((*pool.whole.ranks.pids, os.getpid())) as peak:
        started = time.perf_counter()
        model = on_ranks(pool, mini.opened(path), degrees, dtype, "sdpa", lambda: None)
        seconds = time.perf_counter() - started
    held, mapped = peak.extra
    on_devices = sum(model.resident.device_bytes) if emulated else 0
    return {
        "seconds": seconds,
        "held": (held - on_devices) / size,
        "mapped": mapped / size,
        "weights": sum(model.weight_bytes) / size,
        "host": sum(model.resident.host_bytes) / size,
    }


def in_format(folder: Path, path: Path, kind: str | None, dtype: torch.dtype) -> int:
    """Writes the weights in `folder` to `path` in the native layout, quantised as `kind`, others in `dtype`. Its bytes."""
    plain = load_file(folder / WEIGHTS)
    stored = plain
    if kind is not None:
        from testing.quantised import quantise_blocks  # it imports comfy_kitchen, which plain formats do without

        stored = quantise_blocks(plain, kind)[0]
    kept = {key: value.to(dtype).contiguous() if value is plain.get(key) else value for key, value in stored.items()}
    save_file(kept, path)
    return path.stat().st_size


def by_format(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Mode and format -> what `measure` gives, the highest of the rounds."""
    subject, found = large(given.gigabytes, heads=4), {}
    folder, other, path, small = (directory / name for name in ("plain", "other", "file.safetensors", "small.safetensors"))
    for model, place in ((subject, folder), (FLUX_LIKE, other)):
        place.mkdir()
        model.save(place)
    for format in given.formats:
        dtype = "fp32" if format == "fp32" else "bf16"
        size = in_format(folder, path, FORMATS[format], TORCH_DTYPES[dtype])
        in_format(other, small, FORMATS[format], TORCH_DTYPES[dtype])  # so that imports do not count
        for mode, degrees in FORMAT_MODES.items():
            with closing(Pool(("cpu",) * degrees.world, threads=1)) as pool:
                pool.ready.result()
                on_ranks(pool, mini.opened(small), degrees, dtype, "sdpa", lambda: None)
                runs = [measure(pool, path, size, degrees, dtype) for _ in range(given.rounds)]
            found[f"{format}, {mode}"] = {"file_MB": round(size / 1e6, 1), **summary(runs)}
            print(f"{format}, {mode}: {found[f'{format}, {mode}']}", flush=True)
    return {"model": f"{subject}; in the page cache", "formats": found}


def summary(runs: list[dict[str, float]]) -> dict[str, float]:
    return {
        "seconds": round(statistics.median(run["seconds"] for run in runs), 2),
        **{key: round(max(run[key] for run in runs), 3) for key in ("held", "mapped", "weights", "host")},
    }


def by_mode(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in MODES}
    subject = large(given.gigabytes)
    path, small = subject.save(directory / "large"), FLUX_LIKE.save(directory / "small")
    size = path.stat().st_size
    streamed = {f"{name}, streamed": MODES[name] for name in STREAMED}
    found |= {name: [] for name in streamed}
    device = EmulatedDevice(round(ROOM * size), RATE)
    for start, modes in ((LocalRanks, MODES), (start_with(device), streamed)):
        with closing(Pool(("cpu",) * RANKS, threads=1, start=start)) as pool:
            pool.ready.result()
            on_ranks(pool, mini.opened(small), MODES["tensor 4"], "fp32", "sdpa", lambda: None)
            for turn in range(given.rounds):
                for name, degrees in modes.items():
                    found[name].append(measure(pool, path, size, degrees, emulated=modes is streamed))
                    print(f"round {turn + 1}/{given.rounds}  {name:32} {found[name][-1]}", flush=True)
    model = f"{subject}; a file of {size / 1e9:.2f} GB, in the page cache"
    return {"model": model, "modes": {name: summary(runs) for name, runs in found.items()}}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gigabytes", type=float, default=2.0)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--formats", type=lambda text: text.split(","), help=f"of {', '.join(FORMATS)}")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    if any(FORMATS[format] for format in given.formats or ()):
        need("comfy_kitchen", "a quantised format")
    with tempfile.TemporaryDirectory() as directory:
        measured = (by_format if given.formats else by_mode)(given, Path(directory))
    result = {
        "date": date.today().isoformat(),
        "hardware": measuring.hardware(),
        "rounds": given.rounds,
        "figures": "memory and weights as multiples of the file, over all ranks; highest and median of the rounds",
    }
    measuring.report(result | measured, given.out)


if __name__ == "__main__":
    main()
