"""Short runs of `python -m tests.campaigns.states`."""

from collections.abc import Iterator

import pytest

from tests.campaigns.states.machine import World, make_world
from tests.campaigns.states.trial import trial

pytestmark = pytest.mark.threads


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    with make_world(tmp_path_factory.mktemp("states")) as made:
        yield made


def test_models_are_as_alone_whatever_happens_around_them(world: World):
    found = trial(world, examples=6, steps=12, seed=1)
    assert not found.said, found.said
    assert found.examples == 6


@pytest.mark.full
def test_for_longer(world: World):
    found = trial(world, examples=100, steps=20, seed=1)
    assert not found.said, found.said
    assert {"room for all", "room for one", "refused"} <= found.happened.keys()
