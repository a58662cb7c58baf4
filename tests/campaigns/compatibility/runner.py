"""Runs the trials of nodes in a booted ComfyUI, which is booted anew where one hangs or dies."""

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from testing.comfyui.scripted import ComfyUI, Inside
from tests.comfyui.conftest import SCRIPTS

from .settings import SETTINGS
from .verdict import MODES, NATIVE, Verdict, judge

CORE = "core"
MODELS = {"flux": "flux-dev", "sd3": "sd3.5-medium", "wan": "wan-2.1-t2v"}
SECONDS, TRIAL_SECONDS = 600.0, 240.0
"""A process takes no new trial after so long; a trial that takes so long hangs."""
LORA_RANK = 4


@dataclass(frozen=True)
class Node:
    """`pack`: its folder's name, or CORE. `kind`: see inside/node_graphs.py. `own`: the name of its class."""

    pack: str
    name: str
    title: str
    kind: str
    own: str

    @property
    def key(self) -> str:
        return re.sub(r"\W", "_", self.name)


def save_models(base: Path, comfyui: ComfyUI) -> None:
    """Of each class a model, `<case>.safetensors`, another with other weights, `-2`, and a LoRA."""
    for folder in ("models/diffusion_models", "models/loras", "input", "output", "user"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    inside = Inside(comfyui, base, SCRIPTS)
    try:
        inside.run("small_files", names=list(MODELS.values()))
    finally:
        inside.close()
    for name in MODELS.values():
        path = base / "models/diffusion_models" / f"{name}.safetensors"
        weights, g = load_file(path), torch.Generator().manual_seed(7)
        other = {key: value + 0.1 * value.std() * torch.randn(value.shape, generator=g) for key, value in weights.items()}
        save_file({key: torch.nan_to_num(value, 0.0) for key, value in other.items()}, path.with_stem(f"{name}-2"))
        lora = {}
        for key, value in weights.items():
            if value.ndim == 2 and key.endswith(".weight") and min(value.shape) >= LORA_RANK and "block" in key:
                layer = f"diffusion_model.{key.removesuffix('.weight')}"
                lora[f"{layer}.lora_A.weight"] = 0.1 * torch.randn(LORA_RANK, value.shape[1], generator=g)
                lora[f"{layer}.lora_B.weight"] = 0.1 * torch.randn(value.shape[0], LORA_RANK, generator=g)
        save_file(lora, base / "models/loras" / f"{name}.safetensors")


class PackSession:
    """A base directory with the models, and a booted ComfyUI with one pack more in it, until `close`."""

    def __init__(self, comfyui: ComfyUI, models: Path, pack: Path | None):
        self.comfyui, self.pack = comfyui, pack
        self.base = Path(tempfile.mkdtemp(prefix="parallel-dit-compatibility-"))
        shutil.copytree(models, self.base, dirs_exist_ok=True)
        (self.base / "expected").mkdir()
        self.progress = self.base / "progress.jsonl"
        self.nodes: list[Node] = []
        self.failed = ""
        self._boot()

    def close(self) -> None:
        self._end()
        shutil.rmtree(self.base, ignore_errors=True)

    def _boot(self) -> None:
        self._inside = Inside(self.comfyui, self.base, SCRIPTS)
        packs = [] if self.pack is None else [str(self.pack)]
        found, _ = self._inside.run("compatibility", here=True, packs=packs)
        name = CORE if self.pack is None else self.pack.name
        self.nodes = [
            Node(name, node, about["title"], about["kind"], about["own"])
            for node, about in found["nodes"].get(name, {}).items()
        ]
        self.failed = found["failed"].get(name, "")

    def _end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):  # of one that was killed
            self._inside.close()

    def run(self, nodes: list[Node], model: str) -> Iterator[Verdict]:
        """Each node with a model, in every mode."""
        told: dict[str, dict[str, dict[str, Any]]] = {node.key: {} for node in nodes}
        for mode in (NATIVE, *MODES):
            wanted = [node for node in nodes if mode == NATIVE or _runs(told[node.key][NATIVE])]
            while wanted:
                ended = self._some(wanted, model, mode, told)
                wanted = [node for node in wanted if node.key not in ended]
        for node in nodes:
            yield judge((node.pack, node.name, node.title, model), told[node.key], node.own)

    def _some(self, nodes: list[Node], model: str, mode: str, told: dict[str, dict[str, dict[str, Any]]]) -> set[str]:
        """Runs as many as one process can; notes what it told. Their keys."""
        self.progress.unlink(missing_ok=True)
        requests = [{"name": node.name, "kind": node.kind, "key": node.key, **_settings(node, model)} for node in nodes]
        died = ""
        try:
            self._inside.run(
                "compatibility",
                model=MODELS[model],
                mode=mode,
                requests=requests,
                progress=str(self.progress),
                expected=str(self.base / "expected"),
                budget=SECONDS,
                limit=TRIAL_SECONDS,
            )
        except (AssertionError, OSError) as error:
            said = self.base / "compatibility.txt"
            died = said.read_text(errors="replace") if said.exists() else str(error)
        seen: dict[str, dict[str, Any]] = {}
        if self.progress.exists():
            for line in self.progress.read_text().splitlines():
                said = json.loads(line)
                seen.setdefault(said["key"], {"mode": mode}).update(said)
        for trial in seen.values():
            if "outcome" not in trial:
                trial["died"] = how(died)
            elif "after" not in trial:
                trial["after"] = {"error": {"type": "died", "text": how(died)}}
        if not seen:
            raise RuntimeError(f"{model}, {mode}: no trial began:\n{died[-3000:]}")
        for key, trial in seen.items():
            told[key][mode] = trial
        if self._inside.ended:
            self._end()
            self._boot()
        return set(seen)


def _settings(node: Node, model: str) -> dict[str, Any]:
    """Those of the table for every model, with those for this one."""
    entry = SETTINGS.get(node.name, {})
    own = entry.get(model, {})
    floats = {name: entry[name] for name in ("floats",) if name in entry}
    return {
        "inputs": entry.get("inputs", {}) | own.get("inputs", {}),
        "settings": entry.get("settings", {}) | own.get("settings", {}) | floats,
        "nodes": entry.get("nodes", {}),
    }


def _runs(native: dict[str, Any]) -> bool:
    return native.get("outcome", {}).get("finite", False)


def how(died: str) -> str:
    """How a process ended: where its main thread was when a trial hung, or its last words."""
    if "Timeout (" not in died:
        return f"died: {died.strip()[-300:]}"
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\w+)', died[died.rindex("(most recent call first)") :])
    return "Timeout; " + " < ".join(f"{Path(path).name}:{line} {name}" for path, line, name in frames[:6])
