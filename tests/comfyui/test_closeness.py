"""min_closeness: steps stay exact until patches are expected to be as close as the user asks."""

import math

import pytest

pytestmark = pytest.mark.comfyui


@pytest.mark.parametrize("sampler", ["euler", "heun"])
def test_a_run_goes_into_patches_once_it_is_expected_to_be_close_enough(found, sampler):
    got = found[f"25 dB, {sampler}"]
    assert got["expected"] >= 25
    assert got["true"] >= max(25, got["expected"] - 1)  # measured: 0.2 dB less than expected, under heun
    assert got["exact calls"] < 4
    assert f"at least {got['expected']:.0f} dB expected" in got["report"]


@pytest.mark.parametrize("mode", ["PipeFusion", "displaced"])
def test_a_run_that_is_never_close_enough_is_exact(found, mode):
    """It has the fewest patches: a run with more began again."""
    got = found[f"99 dB, {mode}"]
    assert got["difference"] <= 2e-5
    assert got["patches"] == (2 if mode == "PipeFusion" else 1)
    assert math.isinf(got["expected"])
    assert "exact to the last step" in got["report"]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("step cache", "because of a step cache, a ControlNet or a guidance node"),
        ("one patch", "because the run is exact"),
        ("one rank", "because the run is exact"),
    ],
)
def test_a_run_whose_closeness_is_not_judged_says_why(found, case, why):
    got = found[case]
    assert got["expected"] is None
    assert f"min_closeness was not used, {why}" in got["report"]
