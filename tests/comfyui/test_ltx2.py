"""LTX-2 in a real ComfyUI: the MODEL gives what ComfyUI's own gives, for the video and for its sound."""

import math

import pytest
import torch
from safetensors.torch import save_file

from tests.families.cases import ltx2

pytestmark = pytest.mark.comfyui

LIMIT = 5e-5
CASES = {case.name: case for case in ltx2.CASES}
WIDTHS = {"ltx-2.3": 192, "ltx-2.0": 24, "ltx-2.5": 192}
"""Channels of the text encoder's output."""
TRIED = [
    *((what, "one rank") for what in ("dual cfg", "guides", "guidance", "video alone", "lora")),
    *((what, mode) for what in ("dual cfg", "guides") for mode in ("all warm-up", "ulysses")),
]


@pytest.fixture(scope="module")
def found(request, inside, base):
    """Results by case, of one run of ComfyUI for those models that were selected."""
    names = sorted({item.callspec.params["name"] for item in request.session.items if item.path == request.path})
    for name in names:
        CASES[name].save_native(base / "models/diffusion_models" / f"{name}.safetensors")
        generator = torch.Generator().manual_seed(5)
        texts = {sign: torch.randn(1, 7, WIDTHS[name], generator=generator) for sign in ("positive", "negative")}
        save_file(texts, base / f"{name}.inputs.safetensors")
    return inside.run("ltx2", names=names)[0]


@pytest.mark.parametrize(("what", "mode"), TRIED)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if CASES[name].full else ()) for name in CASES])
def test_it_equals_the_native_model(found, name, what, mode, measured):
    native = found[f"{name}, {what}, native"]
    assert "error" not in native, native
    assert 0.1 < native["largest"] < 1000
    got = found[f"{name}, {what}, {mode}"]
    assert "error" not in got, got
    assert got["whole because"] == [None] * (mode == "all warm-up")
    measured(f"ComfyUI parity, largest difference, {name}", got["difference"])
    assert math.isfinite(got["difference"])
    assert got["difference"] <= LIMIT
