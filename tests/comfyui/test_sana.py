"""Sana, which ComfyUI would take for PixArt, is refused by name."""

import pytest

from testing.cases.sana import CASES

pytestmark = pytest.mark.comfyui


def test_a_family_that_comfyui_lacks_is_refused(inside, base):
    case = CASES[0]
    case.save(case.model(), base / "models" / "diffusion_models" / "sana.safetensors")
    found = inside.run("sana")[0]
    assert found["detected"] == "pixart_sigma"
    assert found["loader"]["error"].startswith("ValueError: model_name: sana.safetensors is a model of the kind sana, which")
