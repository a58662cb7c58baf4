"""Each name that this ComfyUI defines is noted in testing/comfyui/names and has a row (tests/nodes/rows.py).

In a ComfyUI without a file of names all but new names are let pass: `python -m testing.comfyui.host_names` writes its file.
"""

from pathlib import Path

import pytest

from testing.comfyui.host_names import Source, host_names
from tests.nodes.rows import COMPLETE, without_a_row

pytestmark = pytest.mark.comfyui


def check_names(checkout: Path) -> None:
    """AssertionError with the names that have no row, or that are others than those noted for this version."""
    names, version = host_names(checkout), Source(checkout).version
    assert without_a_row(names) == []
    assert names == COMPLETE.get(version, names)


def test_every_name_is_noted_and_has_a_row(comfyui):
    check_names(comfyui.checkout)
