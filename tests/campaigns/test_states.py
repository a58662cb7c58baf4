"""A short run of `python -m tests.campaigns.states`, and planted faults that it finds."""

from collections.abc import Iterator

import pytest

from tests.campaigns.states.machine import World, make_world
from tests.campaigns.states.plants import PLANTS, Plant, planted
from tests.campaigns.states.trial import trial

pytestmark = pytest.mark.threads

EXAMPLES = 200
"""Within which a planted fault has to be found."""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    with make_world(tmp_path_factory.mktemp("states")) as made:
        yield made


def test_models_are_as_alone_whatever_happens_around_them(world: World):
    found = trial(world, examples=6, steps=12, seed=0)
    assert not found.said, found.said
    assert found.examples == 6


@pytest.mark.full
def test_for_longer(world: World):
    found = trial(world, examples=100, steps=20, seed=1)
    assert not found.said, found.said
    assert {"room for all", "room for one", "refused"} <= found.happened.keys()


@pytest.mark.full
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_fault_is_found(world: World, plant: Plant):
    with planted(plant):
        found = trial(world, EXAMPLES, steps=15, seed=1)
    assert found.said


def test_plants_find_their_texts():
    for plant in PLANTS:
        with planted(plant):
            pass
