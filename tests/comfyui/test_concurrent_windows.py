"""ComfyUI's context windows on two ranks: several are computed at a time, and the result is what it was without."""

import pytest

pytestmark = pytest.mark.comfyui

LIMIT = 5e-5
"""Of the difference from ComfyUI's own model. The samples' largest value is 15."""
AT_ONCE = {
    "replicas, cfg 1": [1, 2, 3, 4] * 2,
    "replicas, cfg 3": [1, 2] * 4,
    "replicas, unequal prompts": [1, 2, 3, 4] * 4,
    "stages, cfg 1": [1, 2, 3, 4] * 2,
    "stages, cfg 3": [1, 2] * 4,
    "stages, image": [1, 2, 3, 4] * 2,
}
"""Open model calls at the beginning of each call of 2 steps with 4 windows."""


@pytest.mark.parametrize("case", AT_ONCE)
def test_windows_are_computed_together_with_the_result_of_one_by_one(found, case):
    got = found[case]
    assert got["open"] == AT_ONCE[case]
    assert got["in order"]
    assert got["open apart"] <= (2 if "unequal" in case else 1)
    assert got["same"] == 0.0
    assert got["native"] <= LIMIT


def test_without_guidance_each_replica_computes_half_of_the_windows(found):
    assert found["replicas, cfg 1"]["micro-steps"] == [4, 4]
    assert found["replicas, cfg 1"]["shared"] > 0.0


def test_another_packs_conditioning_of_windows_is_computed_together(found):
    got = found["another pack's conditioning"]
    assert got["open"] == [1, 2, 3, 4] * 2
    assert got["same"] == 0.0


@pytest.mark.parametrize("case", ["another pack's order", "another pack is notified", "another pack's model function"])
def test_windows_that_may_depend_on_each_other_are_computed_one_by_one(found, case):
    got = found[case]
    assert got["open"] == [1] * 8
    assert got["same"] == 0.0


@pytest.mark.parametrize(
    ("case", "raised", "calls"), [("error", "ValueError", 2), ("cancelled", "InterruptProcessingException", 3)]
)
def test_a_step_that_ends_early_leaves_nothing_for_the_next_run(found, case, raised, calls):
    got = found[case]
    assert got["raised"] == raised
    assert got["open"] == [1, 2, 3][:calls]
    assert got["left"] == []
    assert got["again"] == 0.0
