"""Controls of VACE's kind (Fun control of MiniMax H3): the parallel MODEL gives what ComfyUI's own model gives with the
same, and its own result again without them."""

import pytest

pytestmark = pytest.mark.comfyui

LIMIT = 5e-5
NAME = "minimax-h3-pruned"
MODES = ("one rank", "pipe 2", "ulysses 2", "pipefusion")


def test_equals_the_native_model_with_the_same_control(found):
    result = found[NAME]
    assert min(result["moved"].values()) > 0.01
    assert "a control that starts after the first block" in result["later"]
    assert "this ControlNet does not fit the model" in result["controlnet"]
    for mode in MODES:
        for which, value in result[mode].items():
            assert value <= LIMIT, (mode, which)
