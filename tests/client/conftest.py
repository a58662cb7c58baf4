"""Models of these tests give way by their sizes alone, not by what this machine has left."""

from collections.abc import Iterator

import pytest

from tests.support import host_memory


@pytest.fixture(scope="module", autouse=True)
def plenty_of_host_memory() -> Iterator[None]:
    with host_memory.plenty():
        yield
