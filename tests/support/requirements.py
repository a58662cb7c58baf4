"""What a test needs of the machine, and what becomes of the test where that is missing."""

from collections.abc import Container, Iterable
from typing import NoReturn

import pytest


class NotHere(pytest.skip.Exception):
    """A skip that `--require` allows."""


def missing(why: str, expected: bool = True) -> NoReturn:
    """Skips the test. Under `--require` it fails, unless the machine is not `expected` to have what is missing.

    For instance: a ComfyUI without its requirements is a defect of the set-up, a machine without any ComfyUI is not.
    """
    raise (pytest.skip.Exception if expected else NotHere)(why)


def missing_nodes(definitions: Container[str], kinds: Iterable[str]) -> None:
    """Skips what needs kinds of nodes that this ComfyUI, an older one, does not have. `definitions`: those that it has."""
    if lacking := sorted(kind for kind in set(kinds) if kind not in definitions):
        missing(f"this ComfyUI has no {', '.join(lacking)}; COMFYUI_PATH may name a newer one", expected=False)
