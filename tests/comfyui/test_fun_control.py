"""Z-Image's Fun control: the parallel MODEL gives what ComfyUI's own model gives with the same."""

import pytest

from tests.comfyui.conftest import unselected

pytestmark = pytest.mark.comfyui

LIMIT = 5e-5
CASES = {"pipe 2": ("inpaint", "two"), "ulysses 2": ("inpaint",), "displaced": ("inpaint",), "tensor 2": ("two",)}
WHOLE_BECAUSE = {"pipe 2": ["Z-Image's Fun control looks at the whole latent"], "displaced": [None]}
"""Of modes that a wrapper around the sampler runs."""


IN_FULL = (("displaced", "inpaint"), ("tensor 2", "two"), ("pipe 2", "inpaint"))
"""What the control adds is worked out in ComfyUI's process, and cut as a ControlNet's outputs are."""
TRIED = [(mode, name) for mode, names in CASES.items() for name in names]


@pytest.fixture(scope="module")
def found(request, inside):
    skip = unselected(request, "name", "mode", of=[(name, mode) for mode, name in TRIED])
    return inside.run("fun_control", skip=skip)[0]


@pytest.mark.parametrize(
    ("mode", "name"), [pytest.param(*each, marks=pytest.mark.full if each in IN_FULL else ()) for each in TRIED]
)
def test_equals_the_native_model_with_the_same_control(found, measured, mode, name):
    native, got = found[f"{name}, native"], found[f"{name}, {mode}"]
    assert native.get("finite"), native
    assert native["moved"] > 0.05
    assert "error" not in got, got
    measured(f"Z-Image's Fun control, largest difference to ComfyUI's own model, {name}, {mode}", got["difference"])
    assert got["difference"] <= LIMIT
    assert got["whole because"] == WHOLE_BECAUSE.get(mode, [])
