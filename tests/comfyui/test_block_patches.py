"""Nodes that change a model's blocks (skip layer guidance, normalized attention guidance) give what they give on the
native model, whose blocks are in ComfyUI's process."""

import pytest

from tests.comfyui.conftest import mostly_full
from tests.support.requirements import missing

pytestmark = pytest.mark.comfyui

LIMIT = 5e-5
WAN = "wan-2.1-t2v"
EFFECT = ("SLG", "NAG", "WanVideoNAG")
"""Beginnings of the cases in which the node changes the picture. PAG is about a UNet's middle block, HyperTile about
attention that the native SD3 lets no other node patch, as NAG is."""
NONE = ("NAG texts apart, pipefusion", "NAG on SD3, pipefusion")
"""NAG without an effect on the native model either. Two prompts of different length are two calls."""


DEFAULT = (*("SLG, pipefusion", "SLG simple, pipefusion", "SLG SD3, pipefusion", "NAG, pipefusion", "NAG batch 2, ulysses"),)
NAMES = (
    *DEFAULT,
    *("SLG in some steps, pipefusion", "PAG, pipefusion", "HyperTile on SD3, pipefusion"),
    *("NAG cfg 1, pipefusion", "NAG batch 2, split batch", "NAG, tensor", *NONE),
    "WanVideoNAG in front, parallelized",
)


@pytest.fixture(scope="module")
def found(request, inside):
    inside.run("small_files", names=[WAN])
    skip = [name for name in NAMES if name not in selected(request)]
    return inside.run("block_patches", wan=WAN, skip=skip)[0]


def selected(request) -> set[str]:
    ours = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {item.callspec.params["name"] for item in ours}


@pytest.mark.parametrize("name", mostly_full(NAMES, DEFAULT))
def test_a_case_equals_the_native_model(found, measured, name):
    case = found[name]
    if "lacks" in case:
        missing(f"this ComfyUI lacks {case['lacks']}", expected=False)
    assert "error" not in case, case
    measured(f"block patches, largest difference, {name}", case["difference"])
    assert case["difference"] <= LIMIT
    assert case["whole because"] == [None] * name.endswith("pipefusion"), case
    assert (case["effect"] > 100 * LIMIT) == (name.startswith(EFFECT) and name not in NONE), case


def test_no_case_is_left_out(request, found):
    assert set(found) == {*selected(request), "refusal"}


def test_text_guidance_of_a_class_without_it_is_refused(found):
    assert "a second text: it does not run with a second text (" in found["refusal"]["error"]
