"""Controls of VACE's kind (Fun control of MiniMax H3 and Qwen-Image 2.1): the parallel MODEL gives what ComfyUI's own model
gives with the same, and its own result again without them."""

import pytest

from tests.comfyui.test_families import CASES, has_class, save_case, skip_without_class

pytestmark = pytest.mark.comfyui

QWEN = next(case for case in CASES if case.name == "qwen-image-2.1-edit")
H3 = "minimax-h3-pruned"
"""Run by ComfyUI's own class."""
MODES = ("one rank", "pipe 2", "ulysses 2", "pipefusion")


@pytest.fixture(scope="module")
def found(comfyui, inside, base):
    inside.run("small_files", names=[H3])
    names = [H3]
    if has_class(comfyui, QWEN):
        save_case(QWEN, base)
        names.append(QWEN.name)
    return inside.run("sequence_control", names=names)[0]


@pytest.mark.parametrize(("name", "limit"), [(H3, 5e-5), (QWEN.name, QWEN.native.limit)])
def test_equals_the_native_model_with_the_same_control(comfyui, found, name, limit, measured):
    if name == QWEN.name:
        skip_without_class(comfyui, QWEN)
    result = found[name]
    assert "error" not in result, result
    assert min(result["moved"].values()) > 0.01
    assert "a control that starts after the first block" in result["later"]
    assert "this ControlNet does not fit the model" in result["controlnet"]
    for mode in MODES:
        for which, value in result[mode].items():
            measured(f"control of all tokens, largest difference to ComfyUI's own model, {name}, {which}", value)
            assert value <= limit, (mode, which)
