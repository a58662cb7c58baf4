"""Checks of the configuration in a file's header, before anything is built from it.

Files come from anywhere. A malicious file must not make a rank build a million layers, or a table that fills its memory.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from parallel_backend.core.short_text import short

MAX_SETTING = 1 << 20
MAX_LIST = 1 << 10
MAX_TEXT = 1 << 10
MAX_UNSEEN = 1 << 12
"""Largest size that no tensor has, such as a length of text."""
COUNTED = "layers", "blocks", "depth"
"""In names of settings that count modules, each of which has a tensor at least."""


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
                f"model_name: {name} says in its header that its {short(argument)} is {short(value)}, which no model with "
                "such tensors has. It is damaged, or made to do harm: get the model anew."
            )


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
