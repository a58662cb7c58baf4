"""Files in published layouts, loaded by ComfyUI and opened by the pack. Run by serve.py.

The test process has put the files into models/diffusion_models.
"""

import logging
import sys
from pathlib import Path
from typing import Any

import folder_paths
from boot import BASE, PACK, Results, comfy, native_model, nodes, torch

sys.path.insert(0, str(PACK))
from parallel_backend.checkpoints.tensor_files import MappedFile, read_header

sys.path.remove(str(PACK))
LOADER = sys.modules[nodes.NODE_CLASS_MAPPINGS["ParallelDiTLoader"].__module__]
LOADING = f"{LOADER.__package__}.model.loading"
LISTS = {"unet missing": "missing", "unet unexpected": "unexpected"}
"""Beginnings of lines in ComfyUI's log."""


class Log(logging.Handler):
    """ComfyUI's lists of tensors that a class misses, and of those that it has no use for."""

    def __init__(self):
        super().__init__()
        self.lists: dict[str, list[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        begin, _, names = record.getMessage().partition(": ")
        if begin in LISTS:
            self.lists[LISTS[begin]] = [name.strip(" '") for name in names.strip("[]").split(",")]


def native(path: Path) -> Any:
    """ComfyUI's MODEL. GGUF files are handed on as ComfyUI-GGUF does it."""
    if path.suffix.lower() != ".gguf":
        return native_model(path)
    header, file = read_header(path), MappedFile(path)
    tensors = {key: file.tensor(entry).clone() for key, entry in header.entries.items()}
    options = {"dtype": torch.float32}
    return comfy.sd.load_diffusion_model_state_dict(tensors, model_options=options, metadata=header.texts)


def by_comfyui(path: Path) -> dict:
    """{"kind": class of its supported_models, "missing": ..., "unexpected": ...} or {"refused": words}."""
    log, root = Log(), logging.getLogger()
    root.addHandler(log)
    try:
        model = native(path)
        return {"kind": type(model.model.model_config).__name__, "missing": [], "unexpected": []} | log.lists
    except Exception as error:  # of any kind: its code is not known
        return {"refused": f"{type(error).__name__}: {error}"}
    finally:
        root.removeHandler(log)


def by_pack(path: Path) -> dict:
    """{"kind": class of ComfyUI's supported_models, "unused": ...} or {"refused": words}."""
    try:
        file = LOADER.open_file(path, LOADER.importing("cpu"))
        return {"kind": file.own.kind, "unused": list(file.checkpoint.unused)}
    except ValueError as error:
        return {"refused": str(error)}


def names_of_diffusers() -> dict[str, tuple[int, ...]]:
    """Names of a UNet in diffusers' layout, with shapes by which ComfyUI knows it and small ones elsewhere."""
    unet = comfy.model_detection.unet_config_from_diffusers_unet
    small = {"conv_in.weight": (320, 4), "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight": (2, 768)}
    depths = [2, 2, 2, 0]
    for block, attentions in enumerate(depths):
        for index in range(2):
            small[f"down_blocks.{block}.resnets.{index}.norm1.weight"] = (2,)
            if attentions:
                layer = f"down_blocks.{block}.attentions.{index}.transformer_blocks.0.attn2.to_k.weight"
                small[layer] = (2, 768)
    config = unet({name: torch.empty(shape, device="meta") for name, shape in small.items()})
    names = [name for name in comfy.utils.unet_to_diffusers(config) if "_embedding." not in name or name.startswith("time")]
    return dict.fromkeys(names, (6, 2)) | small


def is_comfyuis_conversion() -> bool:
    """Whether rows, taken as `conversion_of` says, are ComfyUI's conversion of the same tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in names_of_diffusers().items()}
    rows = sys.modules[f"{LOADING}.model_file"].conversion_of(tensors)
    ours = {key: torch.cat([tensors[each][start:stop] for each, start, stop in parts]) for key, parts in rows}
    config = comfy.model_detection.model_config_from_diffusers_unet(tensors)
    names = comfy.utils.unet_to_diffusers(config.unet_config)
    theirs = {names[name]: value for name, value in tensors.items() if name in names}
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def main(results: Results, files: dict[str, str]) -> None:
    """`files`: by layout."""
    for name, file in files.items():
        path = BASE / "models" / "diffusion_models" / file
        results.case(name, lambda path=path: {"comfyui": by_comfyui(path), "pack": by_pack(path)})
    results.case("conversion of unet", is_comfyuis_conversion)
    results.case(
        "listed",
        lambda: {"pack": LOADER.model_names(), "comfyui": folder_paths.get_filename_list("diffusion_models")},
    )
