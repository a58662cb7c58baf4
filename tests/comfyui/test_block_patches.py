"""Nodes that change a model's blocks (skip layer guidance, normalized attention guidance) give what they give on the
native model, whose blocks are in ComfyUI's process."""

import pytest

from tests.comfyui.test_families import CASES, save_case

pytestmark = pytest.mark.comfyui

LIMIT = 5e-5
WAN = next(case for case in CASES if case.name == "wan-2.1-t2v")
EFFECT = ("SLG", "NAG", "WanVideoNAG")
"""Beginnings of the cases in which the node changes the picture. PAG is about a UNet's middle block, HyperTile about
attention that the native SD3 lets no other node patch, as NAG is."""
NONE = ("NAG texts apart, pipefusion", "NAG on SD3, pipefusion")
"""NAG without an effect on the native model either. Two prompts of different length are two calls."""


@pytest.fixture(scope="module")
def found(inside, base):
    save_case(WAN, base)
    return inside.run("block_patches", wan=WAN.name)[0]


def test_every_case_equals_the_native_model(found, measured):
    assert found
    for name, case in ((name, case) for name, case in found.items() if name != "refusal"):
        assert "error" not in case, (name, case)
        measured(f"block patches, largest difference, {name}", case["difference"])
        assert case["difference"] <= LIMIT, name
        assert case["whole because"] == [None] * name.endswith("pipefusion"), (name, case)
        assert (case["effect"] > 100 * LIMIT) == (name.startswith(EFFECT) and name not in NONE), (name, case)


def test_text_guidance_of_a_class_without_it_is_refused(found):
    assert "a second text: it does not run with a second text (" in found["refusal"]["error"]
