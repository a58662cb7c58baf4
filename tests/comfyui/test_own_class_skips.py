"""Skip Layer Guidance on a class that no family computes gives what it gives on ComfyUI's own MODEL."""

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]
LIMIT = 2e-5
MODES = {
    "every step": ["stages", "split batch", "ulysses", "ring", "tensor", "PipeFusion with all steps exact"],
    "simple": ["stages"],
}


def test_skipped_blocks_of_a_class_equal_the_native_model(inside, measured):
    found, _ = inside.run("own_class_skips", name="hunyuan-video", modes=MODES)
    for case in (f"{node}, {mode}" for node, modes in MODES.items() for mode in modes):
        assert "error" not in found[case], (case, found[case])
        measured(f"own class, skipped blocks, {case}", found[case]["share"])
        assert found[case]["share"] <= LIMIT, (case, found[case])
        assert found[case]["effect"] > 100 * LIMIT, (case, found[case])
        assert not any(found[case]["whole because"]), (case, found[case])
