"""LTX-2 in a real ComfyUI: the MODEL gives what ComfyUI's own gives, for the video and for its sound."""

import math

import pytest

from tests.comfyui.conftest import unselected

pytestmark = pytest.mark.comfyui

LIMIT = 2e-5
"""Of a difference, in the latents' units."""
DEFAULT = ("guidance", "stages"), ("guides", "ulysses"), ("image", "all warm-up")
FULL = (
    *(("table", "stages"), ("dual cfg", "all warm-up"), ("guides", "all warm-up")),
    *(("lora", "stages"), ("guides", "stages"), ("guidance", "all warm-up")),
    *(("video alone", "ulysses"), ("guidance", "ulysses")),
)


@pytest.fixture(scope="module")
def found(request, inside):
    skip = unselected(request, "what", "mode", of=(*DEFAULT, *FULL))
    return inside.run("ltx2", tried=[each for each in (*DEFAULT, *FULL) if ", ".join(each) not in skip])[0]


@pytest.mark.parametrize(("what", "mode"), [*DEFAULT, *(pytest.param(*each, marks=pytest.mark.full) for each in FULL)])
def test_it_equals_the_native_model(found, what, mode, measured):
    native = found[f"{what}, native"]
    assert "error" not in native, native
    assert 0.1 < native["largest"] < 1000
    got = found[f"{what}, {mode}"]
    assert "error" not in got, got
    assert got["whole because"] == [None] * (mode == "all warm-up")
    measured("ComfyUI parity, largest difference, LTX-2.3", got["difference"])
    assert math.isfinite(got["difference"])
    assert got["difference"] <= LIMIT


def test_a_wrapper_that_only_a_parents_forward_runs_is_refused(found):
    assert "a wrapper around the diffusion model" in found["wrapper"]["error"]


def test_a_file_whose_header_was_lost_is_refused(found):
    assert "header of lost.safetensors does not say its rope_type" in found["lost header"]["error"]
