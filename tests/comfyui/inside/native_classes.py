"""Every class of models that ComfyUI has: what Parallel DiT Loader makes of a native file of it. Run by serve.py."""

import inspect
from functools import partial

import comfy.supported_models
from boot import BASE, Results, parallel
from comfy.ldm.wan.model import WanModel
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


def header_entries() -> dict[str, list[str]]:
    """Family -> entries of a file's header that ComfyUI's own classes take notice of."""
    wan = arguments(WanModel) | {
        entry
        for kind in comfy.supported_models.models
        if kind.unet_config.get("image_model") == "wan2.1"
        for entry in kind.unet_config
    }
    return {"wan-animate-2": sorted(wan)}


def arguments(*kinds: type) -> set[str]:
    """Those of their constructors, without what is no setting."""
    names = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return names - {"device", "dtype", "operations", "kwargs", "wan_attn_block_class"}


def main(results: Results, with_files: bool) -> None:
    results.case("header entries", header_entries)
    for kind in comfy.supported_models.models if with_files else ():
        results.case(kind.__name__, partial(load, kind))
