"""A short run of `python -m tests.campaigns.states`, and planted faults that it finds."""

from collections.abc import Iterator

import pytest

from parallel_backend.client.memory_guard import MemoryGuard
from parallel_backend.rank.engine import Engine
from parallel_backend.rank.stage.module_cache import ModuleCache
from tests.campaigns.states.machine import World, make_world
from tests.campaigns.states.trial import trial

pytestmark = pytest.mark.threads

EXAMPLES = 200
"""Within which a planted fault has to be found."""


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


PLANTED = {
    "modules' outputs stay after a merge": (ModuleCache, "forget"),
    "a run that is given up still counts": (MemoryGuard, "forget"),
    "a prompt that was dropped is kept by its ranks": (Engine, "drop_conditioning"),
}
"""Methods that do nothing then: what a first event leaves, a second one meets."""


@pytest.mark.full
@pytest.mark.parametrize(("owner", "method"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found(world: World, monkeypatch, owner, method):
    monkeypatch.setattr(owner, method, lambda *_given: None)
    assert trial(world, EXAMPLES, steps=15, seed=1).said
