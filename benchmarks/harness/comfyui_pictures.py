"""Pictures of the trained mini model as ComfyUI's nodes make them, whole and in bands, and how they are judged."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.fidelity.quality import same_time_steps
from benchmarks.harness import mini_model as mini
from parallel_backend.quickstart.codec import decode
from scripts.comfyui_server import find_python
from testing.comfyui.scripted import ComfyUI, Inside

SCRIPTS = Path(__file__).parent / "inside"


class Studio:
    """One ComfyUI that makes the same pictures again and again. `made`: (steps, bands) -> [N, 256, 256] in 0..1."""

    def __init__(self, inside: Inside, base: Path, symbols: torch.Tensor, cfg: float):
        self._inside, self._base, self.symbols, self._cfg = inside, base, symbols, cfg

    def make(self, runs: list[tuple[int, int]], packs: Path | None, **how: Any) -> dict[tuple[int, int], torch.Tensor]:
        """`runs`: (steps, bands), 0 bands for whole calls. `how`: of benchmarks/harness/inside/guidance_pictures.py."""
        out = self._base / "out.safetensors"
        self._inside.run(
            "guidance_pictures",
            runs=runs,
            prompts=["".join(map(str, own)) for own in self.symbols.tolist()],
            noise=str(self._base / "noise.safetensors"),
            out=str(out),
            cfg=self._cfg,
            packs=None if packs is None else str(packs),
            **how,
        )
        return {tuple(map(int, key.split())): decode(latents) for key, latents in load_file(out).items()}

    def judged(self, runs: list[tuple[int, int, float]], **how: Any) -> tuple[dict[tuple, torch.Tensor], dict[tuple, list]]:
        """Latents, and what benchmarks/harness/inside/closeness.py says of each, by run: (steps, bands, asked for)."""
        noise, out = (self._base / f"{name}.safetensors" for name in ("noise", "out"))
        prompts = ["".join(map(str, own)) for own in self.symbols.tolist()]
        said, _ = self._inside.run(
            "closeness", runs=runs, prompts=prompts, noise=str(noise), out=str(out), cfg=self._cfg, **how
        )
        by_run = {f"{steps} {bands} {asked:g}": (steps, bands, asked) for steps, bands, asked in runs}
        return {by_run[key]: latents for key, latents in load_file(out).items()}, {by_run[key]: said[key] for key in said}


@contextmanager
def studio(images: int, cfg: float, comfyui: Path) -> Iterator[Studio]:
    """`comfyui`: the checkout."""
    symbols, noise = mini.requests(images)
    checkout = comfyui.resolve()
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        save_file({str(index): each.clone() for index, each in enumerate(noise.split(1))}, base / "noise.safetensors")
        inside = Inside(ComfyUI(checkout, find_python(checkout)), base, SCRIPTS)
        yield Studio(inside, base, symbols, cfg)
        inside.close()


def runs_compared(steps: int, bands: list[int]) -> list[tuple[int, int]]:
    """A whole run, runs in bands, and whole runs with steps dropped to the time predicted for those on two stages."""
    fewer = {max(same_time_steps(steps, 2, count)) for count in bands}
    return [(steps, 0), *((steps, count) for count in bands), *((count, 0) for count in sorted(fewer))]


def named(steps: int, run: tuple[int, int]) -> str:
    """A run of `runs_compared`, in words."""
    count, bands = run
    return f"M={bands}" if bands else "one rank" if count == steps else f"one rank, {count} steps instead"
