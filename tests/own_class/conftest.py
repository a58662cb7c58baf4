"""A fixture that several files of this folder have."""

from collections.abc import Iterator

import pytest

from tests.support.planted_comfyui import planted_comfyui


@pytest.fixture
def comfyui() -> Iterator[None]:
    """The planted classes can be imported."""
    with planted_comfyui():
        yield
