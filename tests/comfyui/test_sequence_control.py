"""Controls of VACE's kind (Fun control of MiniMax H3 and Qwen-Image 2.1): the parallel MODEL gives what ComfyUI's own model
gives with the same, and its own result again without them."""

import pytest

from tests.comfyui.test_families import CASES, has_class, save_case, skip_without_class

pytestmark = pytest.mark.comfyui

CONTROLLED = [case for case in CASES if case.name in ("minimax-h3-pruned", "qwen-image-2.1-edit")]
MODES = ("one rank", "pipe 2", "ulysses 2", "pipefusion")
OF_CLASS = ("minimax-h3-pruned",)
"""Run by ComfyUI's own class, too."""


@pytest.fixture(scope="module")
def found(comfyui, inside, base):
    cases = [case for case in CONTROLLED if has_class(comfyui, case)]
    for case in cases:
        save_case(case, base)
    return inside.run("sequence_control", names=[case.name for case in cases], of_class=OF_CLASS)[0]


@pytest.mark.parametrize("case", CONTROLLED, ids=lambda case: case.name)
def test_equals_the_native_model_with_the_same_control(comfyui, found, case, measured):
    skip_without_class(comfyui, case)
    result = found[case.name]
    assert "error" not in result, result
    assert min(result["moved"].values()) > 0.01
    assert "a control that begins behind the first block" in result["later"]
    assert "this ControlNet does not fit the model" in result["controlnet"]
    for mode in (*MODES, *(f"own class, {mode}" for mode in MODES[1:] if case.name in OF_CLASS)):
        for which, value in result[mode].items():
            measured(f"control of all tokens, largest difference to ComfyUI's own model, {case.name}, {which}", value)
            assert value <= case.native.limit, (mode, which)
