"""LTX-2 in a real ComfyUI: the MODEL gives what ComfyUI's own gives, for the video and for its sound."""

import math

import pytest

from testing.cases import all_cases
from tests.comfyui.conftest import unselected
from tests.comfyui.test_families import save_case

pytestmark = pytest.mark.comfyui

CASE = next(case for case in all_cases() if case.name == "ltx-2.3")
TRIED = [
    *((what, "one rank") for what in ("guides", "guidance", "video alone", "lora")),
    *(("dual cfg", "all warm-up"), ("guides", "all warm-up"), ("guides", "ulysses")),
    *((what, "own class by stages") for what in ("lora", "guides")),
    *((what, "own class by ulysses") for what in ("video alone", "guidance")),
    *((what, "own class by all warm-up") for what in ("image", "guidance")),
]


DEFAULT = (
    *(("guidance", "one rank"), ("dual cfg", "all warm-up"), ("guides", "all warm-up"), ("guides", "ulysses")),
    *(("guidance", "own class by ulysses"), ("image", "own class by all warm-up")),
)


@pytest.fixture(scope="module")
def found(request, inside, base):
    save_case(CASE, base)
    return inside.run("ltx2", name=CASE.name, skip=unselected(request, "what", "mode", of=TRIED))[0]


@pytest.mark.parametrize(
    ("what", "mode"), [pytest.param(*each, marks=() if each in DEFAULT else pytest.mark.full) for each in TRIED]
)
def test_it_equals_the_native_model(found, what, mode, measured):
    native = found[f"{what}, native"]
    assert "error" not in native, native
    assert 0.1 < native["largest"] < 1000
    got = found[f"{what}, {mode}"]
    assert "error" not in got, got
    assert got["whole because"] == [None] * mode.endswith("all warm-up")
    measured(f"ComfyUI parity, largest difference, {CASE.name}", got["difference"])
    assert math.isfinite(got["difference"])
    assert got["difference"] <= CASE.native.limit
