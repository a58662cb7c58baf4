"""Parallel Step Cache under ComfyUI's samplers, whole and in bands, and what it says on the sampler's node."""

import pytest

pytestmark = pytest.mark.comfyui

STEPS = 12


@pytest.mark.parametrize("case", ["euler", "bands", "displaced"])
def test_some_calls_are_forecast_and_the_run_repeats(found, case):
    """The second run comes after another prompt's: nothing of either is left."""
    got = found[case]
    assert got["uncached decisions"] == ""
    assert len(got["decisions"]) == STEPS
    assert got["decisions"].startswith("###")
    assert got["decisions"].endswith("#")
    assert got["decisions"].count(".") >= 3
    assert got["same decisions"]
    assert got["repeat"] == 0.0
    assert 1e-5 < got["relative"] < 0.2  # at 12 steps; and displaced keys are two steps old where a call was forecast


def test_a_run_that_cannot_be_cut_has_a_cache_for_whole_calls(found):
    assert "." in found["adaptive in bands"]["decisions"]


def test_calls_outside_the_percents_are_computed(found):
    decisions = found["percents"]["decisions"]
    assert "." in decisions
    assert decisions.startswith("####")
    assert decisions.endswith("###")


def test_threshold_0_takes_the_cache_away(found):
    assert found["off"] == {"difference": 0.0, "decisions": ""}


def test_pipefusion_samplers_report(found):
    got = found["report"]
    assert got["difference"] == 0.0
    computed = got["decisions"].count("#")
    assert computed < STEPS
    assert f"step cache: {computed} of {STEPS} model calls computed" in got["report"]
