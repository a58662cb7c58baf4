"""ComfyUI's own class of a model of real size, traced as ranks are (inside_native.py)."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.sizes.real_models import RealModel
from scripts.comfyui_server import find_python

SCRIPT = Path(__file__).with_name("inside_native.py")


def native_figures(checkout: Path, real: RealModel) -> dict[str, Any]:
    """Of a call: "kernels", "products", "moved", "stops", and "by name", (kernels, bytes moved) by operation.

    RuntimeError with ComfyUI's log if it fails.
    """
    command = [find_python(checkout), str(SCRIPT)]
    done = subprocess.run(command, cwd=checkout, input=json.dumps([_case(real)]), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ComfyUI ended:\n{done.stderr[-8000:]}")
    return json.loads(done.stdout)[0]


def _case(real: RealModel) -> dict[str, Any]:
    call = real.call_tensors()
    return {
        "shapes": _shapes(real),
        "tensors": {name: tuple(value.shape) for name, value in call.items()},
        "values": {},
        "latents": (real.latent,),
        "entries": real.entries,
        "timestep": real.timestep,
    }


def _shapes(real: RealModel) -> dict[str, tuple[int, ...]]:
    """Of the file's tensors."""
    with tempfile.TemporaryDirectory() as folder, real.save(Path(folder) / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
