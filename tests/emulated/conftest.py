"""Emulated devices for a file of tests: `both` of this folder's tests."""

from collections.abc import Iterator

import pytest

from tests.campaigns.transport.cases import Files
from tests.support.cpu_and_gpu import Both, both_kinds


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Files:
    """Tiny models, made when first asked for."""
    return Files(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with both_kinds() as made:
        yield made
