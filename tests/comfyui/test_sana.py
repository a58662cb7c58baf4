"""Sana, which ComfyUI would take for PixArt, is refused by name."""

import pytest

from tests.families.cases.sana import CASES

pytestmark = pytest.mark.comfyui


def test_a_family_that_comfyui_lacks_is_refused(comfyui, tmp_path):
    models = tmp_path / "models" / "diffusion_models"
    models.mkdir(parents=True)
    case = CASES[0]
    case.save(case.model(), models / "sana.safetensors")
    found = comfyui.run("sana.py", tmp_path)[0]
    assert found["detected"] == "pixart_sigma"
    assert found["loader"]["error"].startswith("ValueError: model_name: sana.safetensors is a model of the kind sana, which")
