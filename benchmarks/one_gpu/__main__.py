"""A quarter of an hour on one GPU: what only a card can show, in one command, the most important first.

    bash scripts/one_gpu
    bash scripts/one_gpu --only "driver calls,captures"
    bash scripts/one_gpu --cpu              without a GPU: the parts that have a form for CPU ranks or emulated GPUs

Each part has a process of its own and a time limit. After each the results so far are in one JSON (--out), so that a run
that is cut leaves what it has found. Ends with 0 if any part ran, also if it failed: the JSON and a line for each say so.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import measuring

from . import shared_card
from .frame import LEFT_OUT, ROOT, Part, run_parts

MINUTES = 15.0
NO_DEVICE = "no CUDA device"


@dataclass(frozen=True)
class Probe:
    """A part's name, limit and command on a GPU. `cpu`: the command without one; empty if there is none. `nccl`: runs with
    the NCCL of --nccl, if that is given."""

    name: str
    seconds: float
    gpu: tuple[str, ...]
    cpu: tuple[str, ...] = ()
    nccl: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def part(self, cpu: bool, nccl: Path | None) -> Part:
        """`nccl`: the library that processes load before torch's own."""
        command, lacks = self.gpu, ""
        if cpu:
            command, lacks = self.cpu, "" if self.cpu else NO_DEVICE
        elif not torch.cuda.is_available():
            lacks = NO_DEVICE
        preloaded = {"LD_PRELOAD": str(nccl)} if nccl is not None and self.nccl and not cpu else {}
        return Part(self.name, self.seconds, ("-m", *command), self.environment | preloaded, lacks)


def _command(module: str, *options: str) -> tuple[str, ...]:
    return module, "--out", "{out}", *options


def _probe(name: str, *options: str) -> tuple[str, ...]:
    return _command(f"benchmarks.one_gpu.{name}", *options)


def _tests(*options: str) -> tuple[str, ...]:
    return "pytest", "-p", "no:cacheprovider", "--junit-xml", "{xml}", *options


def _many(ranks: int, how: str) -> Probe:
    command = _probe("many_ranks", "--ranks", str(ranks), "--how", how)
    return Probe(f"{ranks} ranks by {how}", 60, command, (*command, "--device", "cpu"), nccl=True)


PROBES = (
    Probe("driver calls", 60, _probe("lock_probe")),
    Probe("NCCL on one card", 90, _tests("tests/gpu/test_nccl_on_one_card.py", "-k", "every_mode")),
    *(_many(4, "shm"), _many(4, "p2p"), _many(8, "shm")),
    Probe(
        "one rank beside ComfyUI",
        110,
        _command("benchmarks.speed.one_gpu_native", "--rounds", "2", "--steps", "4"),
    ),
    Probe("profile of a rank", 60, _probe("rank_profile")),
    Probe("host time", 60, _probe("host_time"), _probe("host_time", "--device", "cpu")),
    Probe("captures", 30, _probe("captures"), nccl=True),
    Probe("spinning receive", 40, _probe("spinning"), nccl=True),
    Probe("log-sum-exp", 30, _probe("log_sum_exp")),
    Probe(
        "acceptance",
        90,
        _command("parallel_backend.acceptance", "--only", "kernels,modes"),
        _command("parallel_backend.acceptance", "--only", "kernels,modes", "--devices", "cpu,cpu"),
    ),
    Probe(
        "faults",
        45,
        _probe("out_of_memory"),
        _tests("tests/gpu/test_faults.py", "--emulated-gpus", "HOPPER HOPPER", "-k", "killed and exact"),
    ),
    Probe("compile", 100, _command("benchmarks.speed.compile", "--rounds", "1", "--steps", "4")),
)


def document(results: dict[str, dict[str, Any]], cpu: bool) -> dict[str, Any]:
    cuda = torch.cuda.is_available() and not cpu
    return {
        "what": "one_gpu",
        "date": date.today().isoformat(),
        "hardware": measuring.hardware(("cuda:0",) if cuda else ("cpu",)),
        "nccl_of_torch": ".".join(map(str, shared_card.version())) if cuda else "",
        "parts": results,
    }


def main(command_line: Sequence[str] | None = None, probes: Sequence[Probe] = PROBES) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [each.name for each in probes]
    options.add_argument("--only", type=lambda text: text.split(","), default=names, help=f"a list of {', '.join(names)}")
    options.add_argument("--cpu", action="store_true", help="the parts that need no GPU")
    options.add_argument("--minutes", type=float, default=MINUTES, help="limit of all parts together")
    options.add_argument("--nccl", type=Path, help="a libnccl.so.2 for the parts whose ranks share the GPU")
    options.add_argument("--folder", type=Path, default=ROOT / "build" / "one_gpu", help="for the parts' files and logs")
    options.add_argument("--out", type=Path, help="the JSON; one_gpu_DATE.json in the folder if it is not given")
    given = options.parse_args(command_line)
    if unknown := set(given.only) - set(names):
        options.error(f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    out = given.out or given.folder / f"one_gpu_{date.today().isoformat()}.json"
    out.parent.mkdir(parents=True, exist_ok=True)

    def found(results: dict[str, dict[str, Any]]) -> None:
        out.write_text(measuring.readable(document(results, given.cpu)) + "\n", encoding="utf-8")

    parts = [probe.part(given.cpu, given.nccl) for probe in probes if probe.name in given.only]
    parts = [replace(part, seconds=min(part.seconds, given.minutes * 60)) for part in parts]
    results = run_parts(parts, given.folder, given.minutes * 60, found, measuring.TimedLog())
    print(f"JSON: {out}")
    return int(all(one["status"] == LEFT_OUT for one in results.values()))


if __name__ == "__main__":
    sys.exit(main())
