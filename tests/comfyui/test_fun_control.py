"""Z-Image's Fun control: the parallel MODEL gives what ComfyUI's own model gives with the same."""

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.full]

LIMIT = 5e-5
CASES = {"two, pipe 2": ["Z-Image's Fun control needs the whole latent"], "inpaint, ulysses 2": []}
"""Case -> why wrappers around the sampler run it whole. What the control adds is worked out in ComfyUI's process, and cut as
a ControlNet's outputs are."""


@pytest.mark.parametrize("case", CASES)
def test_equals_the_native_model_with_the_same_control(found, case):
    got = found[case]
    assert got["moved"] > 0.05
    assert got["difference"] <= LIMIT
    assert got["whole because"] == CASES[case]
