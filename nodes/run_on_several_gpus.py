"""The server's part of the menu's entries: a plan for each loader of a workflow.

web/js/loaders.js asks for the plan. *Run on several GPUs* changes the workflow by it, and *Explain this workflow* shows it.
The request is `POST /parallel_dit/plan` with {"loaders": [{"class_type": ..., "inputs": {...}}]}, in the form of a prompt.
Only headers of files are read.
"""

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

from parallel_backend.checkpoints.single_file import file_state
from parallel_backend.core.devices import device_kind
from parallel_backend.core.dtypes import resolve_dtype
from parallel_backend.core.host_memory import host_memory
from parallel_backend.placement.memory_model import USABLE_MEMORY
from parallel_backend.placement.model_sizes import model_sizes

from .loader import CHECKPOINTS, FOLDER, file_path
from .model.loading.model_file import importing, open_file
from .ui.devices import half_dtypes, possible_devices, why_hidden
from .ui.routes import json_of
from .ui.start_options import wanted_halves

OURS = ("ParallelDiTLoader", "ParallelCheckpointLoader")
TRY_CPU = "To try it on the CPU, use Parallel DiT Loader with cpu,cpu as devices."
MOST_LOADERS = 1000
MOST_BYTES = 1 << 22
"""Maximum size of a request in bytes: MOST_LOADERS loaders of several thousand bytes each."""
MOST_PLANS = 1000
"""Maximum number of files whose plans are stored."""
GGUF_FOLDER = "unet_gguf"
"""The name under which ComfyUI-GGUF registers the folder of diffusion models."""


@dataclass(frozen=True)
class LoaderPlan:
    """What the menu entry does with a loader. Field names are those of the answer's JSON."""

    parallel: bool = False
    """Whether the loader is one of this pack's."""
    takes: bool = False
    """Whether Parallelize Model may follow the loader."""
    why: str = ""
    """The reason why it may not. Empty: it may."""
    file: str = ""
    """The model's name, if known."""
    weights: int = 0
    """Bytes of the model's weights on ranks, if Parallelize Model may follow."""
    pipefusion: str = ""
    """The reason why Apply PipeFusion should follow Parallelize Model. Empty if it should not."""


def plans_of(body: bytes) -> dict[str, Any]:
    """Return the answer to a request. Raises ValueError for anything but a request."""
    return answer(asked(body))


def asked(body: bytes) -> list[Mapping[str, Any]]:
    """Return the loaders of a request. Raises ValueError for anything else."""
    request = json_of(body, "loaders", MOST_BYTES)
    loaders = request.get("loaders") if isinstance(request, dict) else None
    if not isinstance(loaders, list) or len(loaders) > MOST_LOADERS:
        raise ValueError(f"loaders: expected a list of at most {MOST_LOADERS}.")
    for each in loaders:
        if not isinstance(each, dict) or not isinstance(each.get("class_type"), str):
            raise ValueError("loaders: each loader needs a class_type.")
        if not isinstance(each.get("inputs"), dict):
            raise ValueError("loaders: each needs inputs.")
    return loaders


def answer(loaders: list[Mapping[str, Any]]) -> dict[str, Any]:
    """{"devices": number of them, "cards": [{"name": ..., "memory": bytes}], "why": reason why nothing is gained, or "",
    "loaders": LoaderPlans as dicts}."""
    try:
        devices = possible_devices("auto")
    except ValueError as error:  # ComfyUI runs on a kind of device that ranks do not support
        return {"devices": 0, "cards": [], "why": str(error), "loaders": []}
    why = ""
    if len(devices) < 2:
        why = f"ComfyUI shows one GPU on this machine.{why_hidden()}"
        if device_kind(devices[0]) == "cpu":
            why = f"ComfyUI shows no GPU on this machine. {TRY_CPU}{why_hidden()}"
    plans = [loader_plan(each["class_type"], each["inputs"], devices) for each in loaders]
    shown = [{"name": name, "memory": nbytes} for name, nbytes in zip(devices, memory_of(devices), strict=True)]
    return {"devices": len(devices), "cards": shown, "why": why, "loaders": [asdict(each) for each in plans]}


def loader_plan(class_type: str, inputs: Mapping[str, Any], devices: tuple[str, ...]) -> LoaderPlan:
    """Return the plan of one loader. `inputs`: values of its widgets, and links to other nodes."""
    if class_type in OURS:
        return LoaderPlan(parallel=True)
    if (file := model_file(inputs)) is None:
        return LoaderPlan(why="its model file is unknown")
    name, path = file
    return file_plan(name, path, devices, file_state(path))


@functools.lru_cache(MOST_PLANS)
def file_plan(name: str, path: Path, devices: tuple[str, ...], state: str) -> LoaderPlan:
    """Return the plan for a loader of the file at `path`, which it calls `name`. Created once for each `state` of the
    file."""
    try:
        file = open_file(path, importing(devices[0]))
    except ValueError as error:
        return LoaderPlan(file=name, why=str(error).removeprefix("model_name: "))
    native = wanted_halves(half_dtypes(devices), file.own.halves, "default")
    dtype = resolve_dtype("default", file.checkpoint.dtype, devices, file.own.halves, native)
    weights = model_sizes(file.checkpoint, dtype, devices[0]).weight_bytes
    pipefusion = "" if file.own.unet else why_pipefusion(weights, devices)
    return LoaderPlan(takes=True, file=name, weights=weights, pipefusion=pipefusion)


def model_file(inputs: Mapping[str, Any]) -> tuple[str, Path] | None:
    """Return (name, path) of the diffusion model that a node's inputs name. None if there is none, or more than one.

    Packs name their inputs differently, so the folder of the file decides. A name that is in both folders means the
    all-in-one file only if the input's name says so.
    """
    names: dict[Path, str] = {}
    for key, value in inputs.items():
        if not isinstance(value, str) or not value:
            continue
        folders = (CHECKPOINTS, FOLDER) if "ckpt" in key or "checkpoint" in key else (FOLDER, GGUF_FOLDER, CHECKPOINTS)
        paths = (file_path(folder, value) for folder in folders)
        if (path := next((path for path in paths if path is not None), None)) is not None:
            names[path] = value
    if len(names) != 1:
        return None
    ((path, name),) = names.items()
    return name, path


def why_pipefusion(weights: int, devices: tuple[str, ...]) -> str:
    """Why exact modes alone would be slow for a model with `weights` bytes of weights, as text; empty if they would not be.

    Split batch, Ulysses and ring need the whole model on every GPU. Ulysses, ring and tensor need fast links. If one of the
    two is missing, PipeFusion is offered to the planner, which takes it if it is the fastest.
    """
    if weights > USABLE_MEMORY * min(memory_of(devices)):
        return "no GPU holds the whole model"
    indices = [torch.device(name).index for name in devices if device_kind(name) == "cuda"]
    if not all(torch.cuda.can_device_access_peer(one, two) for one, two in permutations(indices, 2)):
        return "the GPUs have no direct link (P2P)"
    return ""


def memory_of(devices: tuple[str, ...]) -> list[int]:
    """Return the bytes of each device, read without creating a CUDA context. CPU ranks share the host's memory."""
    if device_kind(devices[0]) != "cuda":
        return [host_memory()[1] // len(devices)] * len(devices)
    return [torch.cuda.get_device_properties(name).total_memory for name in devices]
