"""ComfyUI's own class of a model of real size, traced as ranks are (inside_native.py)."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from scripts.comfyui_server import find_python
from testing.real_sizes import RealModel

SCRIPT = Path(__file__).with_name("inside_native.py")


def native_figures(checkout: Path, models: list[RealModel]) -> list[dict[str, Any]]:
    """By model, of a call: "kernels", "products", "moved", "stops", and "by name", (kernels, bytes moved) by operation.

    RuntimeError with ComfyUI's log if it fails.
    """
    cases = [_case(real) for real in models]
    command = [find_python(checkout), str(SCRIPT)]
    done = subprocess.run(command, cwd=checkout, input=json.dumps(cases), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ComfyUI ended:\n{done.stderr[-8000:]}")
    return json.loads(done.stdout)


def _case(real: RealModel) -> dict[str, Any]:
    call = real.call_tensors()
    return {
        "shapes": _shapes(real),
        "tensors": {name: tuple(value.shape) for name, value in call.items()},
        "values": {name: _plain(value) for name, value in real.call.items()},
        "latents": real.latents,
        "entries": real.entries,
        "timestep": real.timestep,
    }


def _plain(value: Any) -> Any:
    """For JSON: a tensor is {"shape": its shape}."""
    if isinstance(value, torch.Tensor):
        return {"shape": tuple(value.shape)}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _shapes(real: RealModel) -> dict[str, tuple[int, ...]]:
    """Of the file's tensors."""
    with tempfile.TemporaryDirectory() as folder, real.save(Path(folder) / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
