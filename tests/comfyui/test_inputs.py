"""Latents, prompts and strengths that no node should give, under ComfyUI's own KSampler: see inside/inputs.py."""

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.full]


@pytest.mark.parametrize("case", ["odd", "strengths"])
def test_the_next_prompt_is_the_same_as_before(found, case):
    assert found[f"after {case}"] == 0.0, found[f"after {case}"]


def test_odd_inputs_give_what_the_native_model_gives_or_are_refused(found):
    got = found["odd"]
    assert got["done"] > 5 and got["refused"] > 5


def test_a_strength_that_is_no_number_is_refused(found):
    got = found["strengths"]
    for strength in ("nan", "inf"):
        assert got[strength].startswith("model: "), got
    assert got["0.0"] == "done"
    assert "not finite" in got["1e+30"] or "NaN" in got["1e+30"], got
