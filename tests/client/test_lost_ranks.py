"""Whether a run tries again after its ranks are lost, and with which degrees on the devices that are left."""

import pytest

from parallel_backend.client.lost_ranks import MOST_TRIES, FurtherTries, degrees_left, devices_left
from parallel_backend.core.degrees import Degrees


class Model:
    pass


def test_calls_that_fail_together_are_one_loss_and_there_are_so_many_tries():
    told, models = [], [Model() for _ in range(MOST_TRIES + 1)]
    tries = FurtherTries(told.append)
    for number, model in enumerate(models[:-1]):
        assert tries.allows(model, lambda number=number: f"line {number}")
        assert tries.allows(model, lambda: pytest.fail("prepared already"))
    assert not tries.allows(models[-1], lambda: "a line more")
    assert not tries.allows(models[0], lambda: "a run around the calls, which began with the first")
    assert told == [f"line {number}" for number in range(MOST_TRIES)]


def test_the_first_load_is_not_tried_again_and_a_later_one_is():
    assert not FurtherTries(print).allows(None, lambda: "a line")
    tries, model = FurtherTries(lambda line: None), Model()
    assert tries.allows(model, lambda: "a line")
    assert tries.allows(None, lambda: "its load failed, too")
    assert not tries.allows(None, lambda: "a third one")


def test_a_try_that_would_end_alike_ends_the_run():
    tries, one, two = FurtherTries(lambda line: None), Model(), Model()
    assert tries.allows(one, lambda: "a line")
    assert not tries.allows(two, lambda: "")
    assert not tries.allows(one, lambda: "a line")


@pytest.mark.parametrize(
    ("devices", "lost", "left"),
    [
        (("cuda:0", "cuda:1"), ("cuda:1",), ("cuda:0",)),
        (("cuda:0", "cuda:1", "cuda:0"), ("cuda:0",), ("cuda:1",)),
        (("cpu",) * 3, ("cpu",), ("cpu",) * 2),
        (("ray:cuda",) * 3, ("ray:cuda",), ("ray:cuda",) * 2),
        (("cuda:0",), ("cuda:0",), ("cuda:0",)),
        (("cuda:0", "cuda:1"), ("cuda:5",), ("cuda:0", "cuda:1")),
        (("cuda:0", "cuda:1"), (), ("cuda:0", "cuda:1")),
    ],
)
def test_devices_left(devices, lost, left):
    assert devices_left(devices, lost) == left


@pytest.mark.parametrize(
    ("before", "ranks", "after"),
    [
        (Degrees(pipe=2), 1, Degrees()),
        (Degrees(ulysses=4), 3, Degrees(ulysses=3)),
        (Degrees(pipe=2, ulysses=2), 3, Degrees(pipe=3)),
        (Degrees(batch=2, ulysses=2), 3, Degrees(ulysses=3)),
        (Degrees(batch=2), 1, Degrees()),
        (Degrees(patch=4, patch_mode="naive"), 3, Degrees(patch=3, patch_mode="naive")),
        (Degrees(tensor=4), 3, Degrees(pipe=3)),
        (Degrees(tensor=3), 2, Degrees(tensor=2)),
    ],
    ids=str,
)
def test_degrees_left(before, ranks, after):
    """Of three tensor ranks the layers cannot be cut."""
    assert degrees_left(before, ranks, lambda degrees: degrees.tensor != 3) == after
