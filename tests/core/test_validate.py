"""Degrees that cannot be are refused by widget, and those at the limit are not."""

import pytest

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.validate import MOST_RANKS, check_devices, check_model, check_ranks, factors

MODEL = {"heads": 12, "blocks": 5}


@pytest.mark.parametrize(
    ("degrees", "model"),
    [
        (Degrees(pipe=5), MODEL),
        (Degrees(tensor=3), MODEL | {"head_units": 3}),
        (Degrees(tensor=3, ulysses=4), MODEL | {"head_units": 3}),
        (Degrees(batch=2, pipe=5, ulysses=12), MODEL),
    ],
    ids=str,
)
def test_what_the_model_can_be_cut_into_is_let_through(degrees, model):
    check_model(degrees, **model)


@pytest.mark.parametrize(
    ("degrees", "model", "most"),
    [
        (Degrees(pipe=6), MODEL, "^Set pipefusion_degree to 5 or less: "),
        (Degrees(ulysses=13), MODEL, "^Set ulysses_degree to 12 or less: "),
        (Degrees(tensor=13), MODEL, "^Set tensor_parallel_degree to 12 or less: "),
        (Degrees(tensor=5, ulysses=3), MODEL, "^Set ulysses_degree to 2 or less: "),
        (Degrees(tensor=4), MODEL | {"head_units": 3}, "^Set tensor_parallel_degree to 3 or less: "),
        (Degrees(tensor=2, ulysses=5), MODEL | {"head_units": 3}, "^Set ulysses_degree to 4 or less: "),
    ],
    ids=str,
)
def test_more_is_refused_with_what_goes(degrees, model, most):
    with pytest.raises(ValueError, match=most):
        check_model(degrees, **model)


@pytest.mark.parametrize("count", [1, 4])
def test_there_is_a_device_for_each_rank(count):
    check_devices(Degrees(ulysses=2), ("cpu", "cpu"))
    with pytest.raises(ValueError, match=f"^Set devices to 2 devices, .* devices names {count} .* needs 2"):
        check_devices(Degrees(ulysses=2), ("cpu",) * count)


def test_ranks_are_processes_and_so_not_any_number():
    check_ranks(Degrees(ring=MOST_RANKS))
    with pytest.raises(ValueError, match=f"at most {MOST_RANKS}: .* makes {MOST_RANKS + 1} ranks"):
        check_ranks(Degrees(ring=MOST_RANKS + 1))


def test_factors_are_every_product_once():
    found = list(factors(12, 3))
    assert len(found) == len(set(found)) == 18
    assert all(a * b * c == 12 for a, b, c in found)
