"""Files in ComfyUI's quantised formats, sampled by ComfyUI's own model and by ours: as far from the plain model's samples.

Where inputs are rounded, a difference of rounding becomes one of whole steps, so that a run does not repeat another one:
tests/checkpoints/test_quantised_formats.py compares single layers bit by bit.
"""

import pytest
from safetensors.torch import load_file, save_file

from testing.quantised import quantise_blocks

pytestmark = pytest.mark.comfyui

FILE = "tiny.safetensors"
KINDS = ("fp8", "int8, rotated", "nvfp4", "mxfp8", "w4a4", "w4a8")
MODES = ("one rank", "pipe 2", "ulysses 2", "tensor 2")
RATIO = 0.05
ROUNDED = ("int8, rotated", "w4a4", "w4a8")
"""Formats in which inputs are rounded on a CPU too."""
EXACT = 2e-6


QUICK = {("int8, rotated", "tensor 2"), ("nvfp4", "one rank")}
"""What the default tier has of the table."""


@pytest.fixture(scope="module")
def found(request, inside, base):
    """Results by "case, native" and "case, mode", of one run of ComfyUI for what was selected."""
    calls = [item.callspec.params for item in request.session.items if item.path == request.path]
    wanted = {mode: [call["case"] for call in calls if call["mode"] == mode] for mode in MODES}
    folder, files = base / "models/diffusion_models", {}
    for kind in sorted({call["case"] for call in calls}):
        files[kind] = f"quantised-{len(files)}.safetensors"
        save_file(quantise_blocks(load_file(folder / FILE), kind)[0], folder / files[kind])
    return inside.run("quantised", plain=FILE, files=files, wanted=wanted)[0]


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(case, mode, marks=() if (case, mode) in QUICK else pytest.mark.full, id=f"{case}, {mode}")
        for case in KINDS
        for mode in MODES
    ],
)
def test_it_is_as_far_from_the_plain_model_as_comfyuis_own(found, measured, case, mode):
    native, ours = found[f"{case}, native"], found[f"{case}, {mode}"]
    assert "error" not in native and "error" not in ours, (native, ours)
    ratio = ours["from plain"] / native["from plain"]
    measured(f"{case}, native: distance from the plain model's", native["from plain"])
    measured(f"{case}, {mode}: distance from the plain model's, over native's", ratio)
    measured(f"{case}, {mode}: distance from native's", ours["from native"])
    assert ratio == pytest.approx(1, abs=RATIO)
    assert ours["from native"] < (0.75 * native["from plain"] if case in ROUNDED else EXACT)
