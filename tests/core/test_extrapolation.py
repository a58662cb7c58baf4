"""How far old keys are moved on."""

import pytest

from parallel_backend.core.extrapolation import RATIO_LIMITS, step_ratio


@pytest.mark.parametrize(
    ("times", "ratio"),
    [
        ((1.0, 0.8, 0.6), 1.0),
        ((1.0, 0.8, 0.7), 0.5),
        ((1.0, 0.8, 0.8), 0.0),
        ((1.0, 0.8, 0.9), -0.5),
        ((900.0, 800.0, 650.0), 1.5),
        ((1.0, 0.99, 0.5), RATIO_LIMITS[1]),
        ((1.0, 0.99, 1.5), RATIO_LIMITS[0]),
    ],
)
def test_the_ratio_of_two_steps_is_bounded(times, ratio):
    assert step_ratio(*times) == pytest.approx(ratio)
