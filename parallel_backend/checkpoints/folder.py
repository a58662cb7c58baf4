"""A diffusers folder: its config.json, its index of weights, and its files.

The layout is that of diffusers' `save_pretrained`: weights in one file, or in several with an index that says which tensor
is in which. Beside them may lie another variant's (fp16), or what is left of an interrupted download.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel_backend.core.short_text import short

from .tensor_files import MAX_TENSORS, Entry, read_header

CONFIG, INDEX, INDICES = "config.json", "diffusion_pytorch_model.safetensors.index.json", "*.index*.json"
"""Names of the files. Another variant's index has the variant in its name."""
MAX_CONFIG_BYTES = 1 << 20
"""Most bytes of config.json. The longest known are some thousand bytes."""
MAX_INDEX_BYTES = 1 << 24
"""Most bytes of an index: MAX_TENSORS lines of a key and a file name."""


def read_config(folder: Path) -> dict[str, Any]:
    """The object of config.json. ValueError, naming the folder, if there is none."""
    try:
        config = _read_object(folder / CONFIG, MAX_CONFIG_BYTES)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"model_name: the folder {short(folder.name)} has no readable {CONFIG} of a diffusers model ({short(error)})."
        ) from None
    return config


def read_folder(folder: Path) -> tuple[dict[str, Entry], dict[str, dict[str, Any]]]:
    """Entries and settings as in `tensor_files.Header`, of all files together. With an index, of the files that it names.

    ValueError, naming the folder and the files, for a tensor that is in two files, for a tensor or a file that the index
    names and that is not there, and for a folder without weights.
    """
    name, where = short(folder.name), _read_index(folder)
    files = sorted({folder / file for file in where.values()} or folder.glob("*.safetensors"))
    entries: dict[str, Entry] = {}
    stated: dict[str, dict[str, Any]] = {}
    for file in files:
        if not file.is_file():
            lack = "lacks" if where else "holds"
            raise ValueError(
                f"model_name: {name} {lack} {short(file.name)}{', which is no file' * (not where)}. Get it anew."
            )
        entries_of_file, stated_of_file, _ = read_header(file)
        if (twice := next((key for key in entries_of_file if key in entries), None)) is not None:
            raise ValueError(
                f"model_name: {name} holds {short(twice)} in two files, {short(entries[twice].file.name)} and "
                f"{short(file.name)}. They are two variants of a model, or of two models: leave one of them in the folder."
            )
        entries |= entries_of_file
        stated |= stated_of_file
    if not entries:
        raise ValueError(f"model_name: the folder {name} lacks its weights: there is no .safetensors file in it.")
    for key, file_name in where.items():
        if key not in entries or entries[key].file.name != file_name:
            raise ValueError(
                f"model_name: {name} has an index that says that {short(key)} is in {short(file_name)}, where it is not. "
                "The folder holds files of two models, or an interrupted download: get it anew."
            )
    return entries, stated


def _read_index(folder: Path) -> Mapping[str, str]:
    """Key -> name of its file. Empty: the folder has no index. ValueError, naming the folder, for one that is damaged."""
    found = sorted(folder.glob(INDICES))
    usual = folder / INDEX
    if usual in found:
        found = [usual]
    if not found:
        return {}
    name = short(folder.name)
    if len(found) > 1:
        raise ValueError(
            f"model_name: {name} holds two variants of a model, by {short(found[0].name)} and {short(found[1].name)}. Leave "
            "the files of one of them in the folder."
        )
    try:
        where = _read_object(found[0], MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(where, dict) or not 0 < len(where) <= MAX_TENSORS:
            raise ValueError("it has no weight_map")
        for file_name in set(map(str, where.values())):
            if Path(file_name).name != file_name or "\\" in file_name or not file_name.endswith(".safetensors"):
                raise ValueError(f"{short(file_name)} is no name of a safetensors file in this folder")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"model_name: {name} holds {short(found[0].name)}, which is damaged ({short(error)}).") from None
    return {key: str(file_name) for key, file_name in where.items()}


def _read_object(path: Path, most: int) -> dict[str, Any]:
    if not path.is_file() or path.stat().st_size > most:
        raise ValueError("it is no file, or too long")
    if not isinstance(content := json.loads(path.read_text(encoding="utf-8")), dict):
        raise ValueError("it is no JSON object")
    return content
