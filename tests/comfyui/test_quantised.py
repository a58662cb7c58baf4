"""Files in ComfyUI's quantised formats, sampled by ComfyUI's own model and by ours: as far from the plain model's samples.

Where inputs are rounded, a difference of rounding becomes one of whole steps, so that a run does not repeat another one:
tests/checkpoints/test_quantised_formats.py compares single layers bit by bit.
"""

import pytest
from safetensors.torch import load_file, save_file

from testing.quantised import quantise_blocks

pytestmark = pytest.mark.comfyui

FAMILIES = {"flux": "tiny.safetensors", "sd3": "tiny-sd3.safetensors"}
KINDS = ("fp8", "int8, rotated", "nvfp4", "mxfp8", "w4a4", "w4a8")
MODES = ("one rank", "pipe 2", "ulysses 2", "tensor 2")
CASES = [f"{family}, {kind}" for family in FAMILIES for kind in KINDS]
RATIO = 0.05
ROUNDED = ("int8, rotated", "w4a4", "w4a8")
"""Formats in which inputs are rounded on a CPU too."""
EXACT = 2e-6


QUICK = {("flux, int8, rotated", "one rank"), ("flux, int8, rotated", "tensor 2"), ("flux, nvfp4", "one rank")}
"""What the default tier has of the table."""


@pytest.fixture(scope="module")
def found(request, inside, base):
    """Results by "case, native" and "case, mode", of one run of ComfyUI for what was selected."""
    calls = [item.callspec.params for item in request.session.items if item.path == request.path]
    wanted = {mode: [call["case"] for call in calls if call["mode"] == mode] for mode in MODES}
    folder, files = base / "models/diffusion_models", {}
    for case in sorted({call["case"] for call in calls}):
        family, _, kind = case.partition(", ")
        files[case] = f"quantised-{len(files)}.safetensors"
        save_file(quantise_blocks(load_file(folder / FAMILIES[family]), kind)[0], folder / files[case])
    return inside.run("quantised", plain=FAMILIES, files=files, wanted=wanted)[0]


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(case, mode, marks=() if (case, mode) in QUICK else pytest.mark.full, id=f"{case}, {mode}")
        for case in CASES
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
    measured(f"{case}, native: distance from itself by another attention kernel", native["from itself"])
    assert ratio == pytest.approx(1, abs=RATIO)
    rounded = case.partition(", ")[2] in ROUNDED
    assert ours["from native"] < (0.75 * native["from plain"] if rounded else EXACT)
