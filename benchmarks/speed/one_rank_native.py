"""One CPU rank against ComfyUI's own MODEL of the same file, in the same ComfyUI, format by format.

    python -m benchmarks.speed.one_rank_native --out benchmarks/results/one_rank_native_NAME_DATE.json
    python -m benchmarks.speed.one_rank_native --cases flux --formats fp32,int8

Steps of KSampler (euler, guidance 1), the two in turn and both loaded, one thread each, torch's attention for both. A
figure is the median of a round's steps behind its first; ratios are taken within a round. Both keep freed memory, as ranks
do. Files are made here, with random weights in the native layout. Both compute in fp32; the bf16 file in bf16, as on a GPU
(a ComfyUI on a CPU would expand it at each use). On a CPU comfy-kitchen's kernels are its plain ones, fp8 and nvfp4 are
expanded, and int8 is multiplied.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import measuring
from benchmarks.harness.needs import need
from parallel_backend.rank.allocator import KEPT_BYTES, LARGEST_IN_HEAP
from scripts.comfyui_server import find_python
from testing import mini

FORMATS = {"fp32": None, "bf16": None, "fp8": "fp8", "int8": "int8, rotated", "nvfp4": "nvfp4"}
"""Format -> its name in testing.quantised; None: a plain file."""
AS_RANKS = (
    f"glibc.malloc.mmap_threshold={LARGEST_IN_HEAP}",
    f"glibc.malloc.trim_threshold={KEPT_BYTES}",
    "glibc.malloc.arena_max=1",
)
"""For ComfyUI's process what rank/allocator.py sets in a rank's."""
LIMIT = 1.03
"""Of a rank's time over native's."""


@dataclass(frozen=True)
class Subject:
    """A Flux and its call. `config`: arguments of the mini class, whose tensors have Flux's names. `latent`: [C, H, W].
    `words`: tokens of the text."""

    config: dict[str, Any]
    latent: tuple[int, ...]
    words: int

    @property
    def text(self) -> tuple[int, int]:
        return self.words, self.config["context_width"]

    @property
    def pooled(self) -> int:
        return self.config["pooled_width"]

    def __str__(self) -> str:
        blocks = f"{self.config['double_blocks']} + {self.config['single_blocks']} blocks"
        return (
            f"flux, random weights, hidden {self.config['width']}, {blocks}, latent {list(self.latent)}, {self.words} text "
            "tokens"
        )

    def save(self, path: Path) -> Path:
        return mini.save(mini.random_model(self.config), path)


SUBJECTS = {"flux": Subject(mini.IN_COMFYUI | {"width": 512, "single_blocks": 4}, (16, 64, 64), 32)}
"""Half a second to one second a step on one core."""


@contextmanager
def inside(
    checkout: Path, base: Path, flags: Sequence[str] = ("--use-pytorch-cross-attention",)
) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """A ComfyUI that measures what it is told (harness/inside_comfyui.py). RuntimeError with its log where it ends."""
    script = Path(measuring.__file__).with_name("inside_comfyui.py")
    with (base / "log").open("w") as log:
        process = subprocess.Popen(
            [find_python(checkout), script, checkout, base, *flags],
            cwd=base,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": ":".join(AS_RANKS)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def ask(what: dict[str, Any]) -> dict[str, Any]:
        print(json.dumps(what), file=process.stdin, flush=True)
        if not (answer := process.stdout.readline()):
            raise RuntimeError(f"ComfyUI ended:\n{(base / 'log').read_text(errors='replace')[-8000:]}")
        return json.loads(answer)

    try:
        yield ask
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def row(found: dict[str, Any]) -> dict[str, Any]:
    native, rank = (found[name] for name in ("native", "rank"))
    wall, cpu = ([ours[at] / theirs[at] for ours, theirs in zip(rank, native, strict=True)] for at in (0, 1))
    return {
        "native_seconds": measuring.figure([seconds for seconds, _ in native], 4),
        "rank_seconds": measuring.figure([seconds for seconds, _ in rank], 4),
        "ratio": measuring.figure(wall),
        "cpu_ratio": measuring.figure(cpu),
        "kept": statistics.median(wall) <= LIMIT,
        "relative_difference": float(f"{found['difference']:.2g}"),
        "cores_share_of_others": round(found["beside"], 3),
    }


def quantised(state: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The file's tensors. Imports comfy_kitchen, which plain formats do without."""
    from testing.quantised import quantise_blocks

    return quantise_blocks(state, kind)[0]


def run(
    rounds: int,
    steps: int,
    say: Callable[[str], None],
    checkout: Path,
    subjects: dict[str, Subject] = SUBJECTS,
    formats: Sequence[str] = tuple(FORMATS),
) -> dict[str, Any]:
    """The result. "cpu_ratio": CPU seconds of rank and client together over native's."""
    cases, stolen = {}, measuring.Stolen()
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        folder = base / "models" / "diffusion_models"
        folder.mkdir(parents=True)
        with inside(checkout, base) as ask:
            for name, subject in subjects.items():
                plain = load_file(subject.save(base / "plain.safetensors"))
                call = {"latent": subject.latent, "text": subject.text, "pooled": subject.pooled}
                for format in formats:
                    file, kind = folder / f"{name}-{format}.safetensors", FORMATS[format]
                    save_file(plain if kind is None else quantised(plain, kind), file)
                    dtype = "bf16" if format == "bf16" else "fp32"
                    found = ask({"file": file.name, "dtype": dtype, "call": call, "steps": steps, "rounds": rounds})
                    file.unlink()
                    cases[f"{name}, {format}"] = made = row(found)
                    say(f"{name}, {format}: a rank over native {made['ratio']}")
    return {
        "what": "one_rank_native",
        "date": date.today().isoformat(),
        "hardware": measuring.hardware(),
        "model": "; ".join(map(str, subjects.values())),
        "scope": "KSampler's steps behind the first, one rank and ComfyUI's own model of the same file in turn",
        "steps": steps,
        "rounds": rounds,
        "limit": LIMIT,
        "stolen": stolen.share(),
        "cases": cases,
    }


def main() -> None:
    options: argparse.ArgumentParser = measuring.parser(__doc__)
    options.set_defaults(rounds=4, steps=4)
    options.add_argument("--cases", type=lambda text: text.split(","), default=list(SUBJECTS), help="of flux")
    options.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS))
    options.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    options.add_argument("--beside", default="not noted", help="what else ran on the machine, in words")
    given = options.parse_args()
    if any(FORMATS[format] for format in given.formats):
        need("comfy_kitchen", "a quantised format")
    subjects = {name: SUBJECTS[name] for name in given.cases}
    result = run(given.rounds, given.steps, measuring.TimedLog(), given.comfyui.resolve(), subjects, given.formats)
    measuring.report(result | {"beside": given.beside}, given.out)


if __name__ == "__main__":
    main()
