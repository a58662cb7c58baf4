"""KJNodes' WanVideoNAG, which changes a model's blocks, gives on ranks what it gives on the native model. ComfyUI's nodes
that do so (skip layer guidance, normalized attention guidance) are in tests/campaigns/test_compatibility.py."""

import pytest

pytestmark = pytest.mark.comfyui

LIMIT = 5e-5
NAMES = ("WanVideoNAG, pipefusion", "WanVideoNAG in front, parallelized")


@pytest.mark.parametrize("name", NAMES)
def test_a_case_equals_the_native_model(found, name):
    case = found[name]
    assert case["difference"] <= LIMIT
    assert case["whole because"] == [None] * name.endswith("pipefusion"), case
    assert case["effect"] > 100 * LIMIT, case


def test_text_guidance_of_a_class_without_it_is_refused(found):
    assert "a second text: it does not run with a second text (" in found.error("refusal")
