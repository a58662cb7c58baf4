"""Skip Layer Guidance and NAG give on ComfyUI's own class on ranks what they give on ComfyUI's own MODEL."""

import pytest

from tests.comfyui.test_families import CASES, save_case

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]
LIMIT = 2e-5
EXACT = "PipeFusion with all steps exact"
MODES = ["stages", "split batch", "ulysses", "ring", "tensor", EXACT]
WANTED = {
    "hunyuan-video": {"every step": MODES, "simple": ["stages"]},
    "flux-dev": {"NAG": [*MODES, "tensor and ring", "compiled stages"]},
    "krea2": {"NAG": MODES},
    "SD15": {"NAG": ["split batch"]},
    **{name: {"NAG": ["stages", EXACT]} for name in ("qwen-image", "wan-2.1-t2v", "z-image")},
}
NO_EFFECT = "qwen-image", "wan-2.1-t2v", "z-image"
"""Their classes hand no attention over: NAG has no effect natively either."""


@pytest.fixture(scope="module")
def found(inside, base):
    cases = [case for case in CASES if case.name in WANTED]
    for case in cases:
        save_case(case, base)
    return inside.run("own_class_changes", wanted=WANTED, of_families=[case.name for case in cases])[0]


@pytest.mark.parametrize("name", WANTED)
def test_changed_blocks_of_a_class_equal_the_native_model(found, measured, name):
    for case in (f"{name}, {change}, {mode}" for change, modes in WANTED[name].items() for mode in modes):
        assert "error" not in found[case], (case, found[case])
        measured(f"own class, changed blocks, {case}", found[case]["share"])
        assert found[case]["share"] <= LIMIT, (case, found[case])
        assert (found[case]["effect"] > 100 * LIMIT) == (name not in NO_EFFECT), (case, found[case])
        assert not any(found[case]["whole because"]), (case, found[case])
