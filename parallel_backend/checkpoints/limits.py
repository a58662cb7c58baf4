"""Checks of a checkpoint's configuration, before anything is built from it.

Files come from anywhere. A malicious file must not make a rank build a million layers, or a table that fills its memory.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from parallel_backend.core.short_text import short
from parallel_backend.families import Family
from parallel_backend.families.base.step_inputs import Config

MAX_SETTING = 1 << 20
MAX_LIST = 1 << 10
MAX_TEXT = 1 << 10
MAX_UNSEEN = 1 << 12
"""Largest size that no tensor has, such as a length of text."""
COUNTED = "layers", "blocks", "depth"
"""In names of settings that count modules, each of which has a tensor at least."""


def check_stated(name: str, family: Family, config: Config, stated: Mapping[str, Any]) -> None:
    """ValueError, naming the entry, if the header of file `name` asks for a model that the family does not compute.

    `config`: from the file's tensors. `stated`: the header's configuration.
    """
    header = family.file.header
    if header is None:
        return
    for entry, value in stated.items():
        known = header.values.get(entry)
        if known is None and header.others:
            continue
        shown = f"model_name: {name} says in its header that its {short(entry)} is {short(json.dumps(value))}. "
        if known is None:
            raise ValueError(f"{shown}This version of {family.name} does not know this value, so the image could be wrong.")
        if _as_tuples(value) not in (possible := known(config)):
            values = " or ".join(map(json.dumps, possible))
            raise ValueError(
                f"{shown}With such weights this version of {family.name} computes {entry} {values} only. Load the file with "
                "Load Diffusion Model, on one GPU."
            )


def check_own_arguments(name: str, arguments: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> None:
    """ValueError, naming the argument, for one with which a class would build more than the file `name` has tensors for.

    `arguments`: those of the class that the file's header states, which ComfyUI takes as they are. `shapes`: of its tensors.
    """
    widest = max((size for shape in shapes for size in shape), default=0)
    for argument, value in arguments.items():
        most = max(widest, MAX_UNSEEN)
        if any(word in argument for word in COUNTED):
            most = len(shapes)
        elif "theta" in argument:
            most = MAX_SETTING
        if not _plausible(value, most):
            raise ValueError(
                f"model_name: {name} says in its header that its {short(argument)} is {short(value)}, which no model "
                "with such tensors has. The file is damaged or malicious. Download the model again."
            )


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _plausible(value: Any, most: int) -> bool:
    if isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        return len(value) <= MAX_LIST and all(_is_number(item, most) for item in items)
    if value is None or isinstance(value, bool):
        return True
    return len(value) <= MAX_TEXT if isinstance(value, str) else _is_number(value, most)


def _is_number(value: Any, most: int) -> bool:
    # Some settings are switches, with -1 for off.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and -1 <= value <= most


def check_sizes(name: str, family: Family, config: Config, shapes: list[tuple[int, ...]]) -> None:
    """ValueError if the sizes that follow from `config` do not fit tensors of these shapes."""
    sizes = {
        "attention heads": family.sizes.heads(config),
        "blocks": family.blocks.total(config),
        "channels in a head": family.sizes.head_size(config),
        "channels in a token": family.sizes.hidden(config),
        "channels in a latent": family.sizes.latent_channels(config),
    }
    if (side := family.sizes.max_side(config)) is not None:
        sizes["positions along a side"] = side
    for quantity, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"model_name: {name} has {short(size)} {quantity}: its tensors do not fit each other.")
    widest = max((size for shape in shapes for size in shape), default=0)
    if sizes["channels in a token"] > widest:
        raise ValueError(f"model_name: {name} has a configuration that does not fit its tensors.")
