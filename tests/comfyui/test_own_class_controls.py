"""A ControlNet changes a model that runs as ComfyUI's own class as it changes ComfyUI's own MODEL."""

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]
LIMIT, IN_PATCHES = 2e-5, 5e-6
"""Of a difference, as a share of the latents' largest value: to the native model, and to the family."""
MODES = ["stages", "split batch", "ulysses", "ring", "tensor"]


@pytest.mark.parametrize(("name", "kinds"), [("flux-dev", ("input", "output"))])
def test_a_controlnet_adds_what_it_adds_natively(inside, name, kinds):
    inside.run("small_files", names=[name])
    found, _ = inside.run("own_class_controls", name=name, modes=MODES)
    for kind in kinds:
        for mode in MODES:
            measured = found[f"{name}, {kind}, {mode}"]
            assert measured.get("share", 1) <= LIMIT, (kind, mode, measured)
            assert measured["moved"] > 0.1
        for steps, limit in ((1000, LIMIT), (1, IN_PATCHES)):
            measured = found[f"{name}, {kind}, PipeFusion, {steps} exact steps"]
            assert measured.get("share", 1) <= limit, (kind, steps, measured)
            assert measured["whole because"] == [None]
