"""The command: all kinds of cases, counted by what came of them."""

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch

from parallel_backend.core.degrees import Degrees
from scripts.comfyui_server import find_python
from testing.comfyui.scripted import ComfyUI
from testing.thread_ranks import thread_ranks
from tests.support.planted_comfyui import planted_comfyui

from . import files, hosted
from .verdict import Tally, Trial, ranks_of, run

SHARES = {
    "single files": 0.25,
    "own classes": 0.25,
    "quantised": 0.15,
    "GGUF": 0.05,
    hosted.LORA: 0.15,
    hosted.WORKFLOWS: 0.08,
    hosted.BODIES: 0.07,
}
"""Of all cases."""
HOSTED = (hosted.LORA, hosted.WORKFLOWS, hosted.BODIES)
"""Kinds that need a ComfyUI."""


def degrees(rng: random.Random) -> Degrees:
    """Mostly one rank, since more need the file's part of the arithmetic alone."""
    return rng.choice((*[Degrees()] * 4, Degrees(pipe=2), Degrees(tensor=2)))


def own_degrees(rng: random.Random) -> Degrees:
    """As `degrees`, of those that an own class has."""
    return rng.choice((*[Degrees()] * 4, Degrees(pipe=2), Degrees(ulysses=2)))


def say(number: int, text: str) -> None:
    sys.stdout.write(f"case {number}: {text}\n")
    sys.stdout.flush()


def said(tally: Tally) -> Tally:
    sys.stdout.write(f"{tally}\n")
    sys.stdout.flush()
    return tally


def of_files(count: Callable[[str], int], seed: int, only: Collection[str]) -> Iterator[Tally]:
    """Kinds that are opened here, and run on rank threads."""
    with files.scratch() as name, planted_comfyui(), thread_ranks() as start, ranks_of(start) as ranks:
        place = Path(name)
        kinds: dict[str, Callable[[random.Random], Trial]] = {
            "single files": files.singles(place),
            "quantised": files.packed(place),
            "GGUF": files.ggufs(place),
            "own classes": files.own_classes(place),
        }
        for kind in [kind for kind in kinds if kind in only]:
            cuts = own_degrees if kind in ("own classes", "quantised", "GGUF") else degrees
            yield said(run(kind, kinds[kind], count(kind), seed, ranks, cuts, say))


def of_requests(count: Callable[[str], int], seed: int, only: Collection[str]) -> Iterator[Tally]:
    """Kinds that are sent to a real ComfyUI."""
    checkout = Path(os.environ.get("COMFYUI_PATH", Path.home() / "ComfyUI"))
    comfyui = ComfyUI(checkout, find_python(checkout))
    with files.scratch() as name:
        if hosted.LORA in only:
            (base := Path(name) / "scripts").mkdir()
            yield said(hosted.run_loras(comfyui, base, count(hosted.LORA), seed, say))
        if {hosted.WORKFLOWS, hosted.BODIES} & set(only):
            (base := Path(name) / "server").mkdir()
            with hosted.server_of(comfyui, base) as server:
                host = hosted.Host(server)
                if hosted.WORKFLOWS in only:
                    yield said(host.workflows(count(hosted.WORKFLOWS), seed, say))
                if hosted.BODIES in only:
                    yield said(host.bodies(count(hosted.BODIES), seed, say))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.hostile", description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help=f"of {', '.join(SHARES)}")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    only = options.only or list(SHARES)
    tallies = []
    for kinds in (of_files, of_requests):
        for tally in kinds(lambda kind: max(1, round(options.count * SHARES[kind])), options.seed, only):
            tallies.append(tally)
            if options.out is not None:
                options.out.write_text(json.dumps(result(options.seed, tallies), indent=1) + "\n")
    defects = sum(len(tally.defects) for tally in tallies)
    sys.stdout.write(
        f"{sum(tally.count for tally in tallies)} cases in {time.monotonic() - begun:.0f} s, {defects} defects\n"
    )
    return 1 if defects else 0


def result(seed: int, tallies: list[Tally]) -> dict[str, Any]:
    return {
        "what": "hostile files, LoRA files, workflows and requests: a named error on the client, or a right picture",
        "date": date.today().isoformat(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "seed": seed,
        "cases": sum(tally.count for tally in tallies),
        "ended": sum(len(tally.ended) for tally in tallies),
        "unnamed": sum(len(tally.unnamed) for tally in tallies),
        "wrong": sum(len(tally.wrong) for tally in tallies),
        "kinds": [vars(tally) for tally in tallies],
    }


if __name__ == "__main__":
    sys.exit(main())
