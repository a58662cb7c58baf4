"""Files in ComfyUI's quantised formats, sampled by ComfyUI's own model and by ours: as far from the plain model's samples.

Where inputs are rounded, a difference of rounding becomes one of whole steps, so that a run does not repeat another one:
tests/checkpoints/test_quantised_formats.py compares single layers bit by bit.
"""

import pytest
from safetensors.torch import load_file, save_file

from testing.quantised import quantise_blocks
from tests.comfyui.conftest import mostly_full

pytestmark = pytest.mark.comfyui

FILE = "tiny.safetensors"
KINDS = ("fp8", "int8, rotated", "nvfp4", "mxfp8", "w4a4", "w4a8")
RATIO = 0.05
ROUNDED = ("int8, rotated", "w4a4", "w4a8")
"""Formats in which inputs are rounded on a CPU too."""
EXACT = 2e-6


@pytest.fixture(scope="module")
def found(request, inside, base):
    """By format, of one run of ComfyUI for what was selected."""
    selected = {item.callspec.params["kind"] for item in request.session.items if item.path == request.path}
    folder, files = base / "models/diffusion_models", {}
    for kind in sorted(selected):
        files[kind] = f"quantised-{len(files)}.safetensors"
        save_file(quantise_blocks(load_file(folder / FILE), kind)[0], folder / files[kind])
    return inside.run("quantised", plain=FILE, files=files)[0]


@pytest.mark.parametrize("kind", mostly_full(KINDS, ("int8, rotated", "nvfp4")))
def test_it_is_as_far_from_the_plain_model_as_comfyuis_own(found, measured, kind):
    got = found[kind]
    ratio = got["ours from plain"] / got["native from plain"]
    measured(f"{kind}, native: distance from the plain model's", got["native from plain"])
    measured(f"{kind}, tensor 2: distance from the plain model's, over native's", ratio)
    measured(f"{kind}, tensor 2: distance from native's", got["ours from native"])
    assert ratio == pytest.approx(1, abs=RATIO)
    assert got["ours from native"] < (0.75 * got["native from plain"] if kind in ROUNDED else EXACT)
