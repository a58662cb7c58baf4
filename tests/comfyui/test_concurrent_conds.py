"""Prompts that ComfyUI cannot join to one model call: both replicas compute, and the result is what it was without."""

import pytest

pytestmark = pytest.mark.comfyui

STEPS, LIMIT = 3, 5e-5
ROUNDING = 2e-6
"""Of a sample's largest value: how far from the native one it may be if that is more than LIMIT."""
SIDE_BY_SIDE = (
    ("unequal", [1, 1], [2, 0]),
    ("cfg 1", [1, 0], [1, 0]),
    ("another pack's wrapper", [1, 1], [2, 0]),
)


def test_two_replicas_share_the_prompts(found):
    """Bit for bit what one replica gave, one call after the other, and ComfyUI's own model's picture."""
    result = found["KSampler, 2"]
    assert result["same"] == 0.0
    assert result["one by one"]["micro-steps"] == [2 * STEPS, 0]
    assert result["one by one"]["shared"] == 0.0
    assert result["micro-steps"] == [STEPS, STEPS]
    assert result["shared"] > 0.0
    assert result["native"] <= max(LIMIT, ROUNDING * result["largest"])


@pytest.mark.parametrize(("case", "calls", "apart"), SIDE_BY_SIDE)
def test_what_is_evaluated_side_by_side(found, case, calls, apart):
    result = found[case]
    assert result["same"] == 0.0
    assert result["micro-steps"] == [STEPS * count for count in calls]
    assert result["one by one"]["micro-steps"] == [STEPS * count for count in apart]
    assert bool(result["told"]) == (case == "cfg 1")


def test_one_picture_without_guidance_says_what_to_set_instead(found):
    """Once in a run, which has three steps."""
    told = found["cfg 1"]["told"]
    assert len(told) == 1
    assert "only 1 of 2 copies" in told[0]
    assert "Raise batch_size" in told[0]
    assert "pipefusion_degree" in told[0]


def test_another_packs_wrapper_sees_the_whole_evaluation_once(found):
    seen = found["another pack's wrapper"]["seen"]
    assert seen == [[True, True]] * (2 * STEPS)  # one by one, and side by side


def test_another_packs_model_function_has_the_calls_one_after_the_other(found):
    result = found["another pack's model function"]
    assert result["micro-steps"] == result["one by one"]["micro-steps"] == [2 * STEPS, 0]
    assert result["same"] == 0.0
    assert len(result["told"]) == 1
    assert "model_function_wrapper" in result["told"][0]


def test_an_error_in_the_second_call_is_that_calls(found):
    assert found.error("error in the second call").startswith("ValueError: positive, negative:")


def test_cancel_ends_both_calls(found):
    assert found["cancelled"] == {"raised": "InterruptProcessingException", "posted": 6}
