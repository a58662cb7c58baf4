"""A ControlNet changes a model that runs as ComfyUI's own class as it changes ComfyUI's own MODEL."""

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.full]  # Flux.1's own ControlNets are in test_controlnet.py
LIMIT = 2e-5
"""Of a difference to the native model, as a share of the latents' largest value."""
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
        measured = found[f"{name}, {kind}, PipeFusion, all steps exact"]
        assert measured.get("share", 1) <= LIMIT, (kind, measured)
        assert measured["whole because"] == [None]
