"""Nodes that change a model's blocks (skip layer guidance, normalized attention guidance, KJNodes' WanVideoNAG) give on
ranks what they give on the native model."""

import pytest

pytestmark = pytest.mark.comfyui

LIMIT = 5e-5
NAMES = (
    *("SLG, pipefusion", "SLG SD3, pipefusion", "NAG batch 2, ulysses"),
    *("WanVideoNAG, pipefusion", "WanVideoNAG in front, parallelized"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_case_equals_the_native_model(found, measured, name):
    case = found[name]
    measured(f"block patches, largest difference, {name}", case["difference"])
    assert case["difference"] <= LIMIT
    assert case["whole because"] == [None] * name.endswith("pipefusion"), case
    assert case["effect"] > 100 * LIMIT, case


def test_text_guidance_of_a_class_without_it_is_refused(found):
    assert "a second text: it does not run with a second text (" in found.error("refusal")
