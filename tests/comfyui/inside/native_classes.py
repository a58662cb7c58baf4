"""Every class of models that ComfyUI has: what Parallel DiT Loader makes of a native file of it. Run by serve.py."""

from functools import partial

import comfy.supported_models
from boot import BASE, Results, parallel
from native_files import HEADERS, native_shapes, write_hole


def load(kind: type) -> dict:
    """What ComfyUI takes the file for, and the class of the loader's MODEL. The loader's ValueError is the case's error."""
    name = kind.__name__
    path = BASE / "models" / "diffusion_models" / f"native-{name}.safetensors"
    write_hole(path, native_shapes(kind), HEADERS.get(name, {}))
    try:
        return {"model": type(parallel(path.name, pipe=1, devices="cpu").model.model_config).__name__}
    finally:
        path.unlink()


def main(results: Results) -> None:
    for kind in comfy.supported_models.models:
        results.case(kind.__name__, partial(load, kind))
