"""Two templates of the campaign from end to end."""

import contextlib
import json

import pytest

from testing.comfyui.scripted import INSIDE, Inside
from tests.campaigns.templates.conversion import convert
from tests.campaigns.templates.files import CASES
from tests.campaigns.templates.runner import EQUAL, run_all
from tests.comfyui.conftest import SCRIPTS, comfyui  # noqa: F401 (a fixture)
from tests.support import chromium
from tests.support.requirements import missing


def test_every_case_of_a_file_is_a_small_model():
    small = json.loads((INSIDE / "small_models.json").read_text("utf-8"))
    assert {case for _, case in CASES} <= small.keys()


@pytest.mark.full
@pytest.mark.comfyui
@pytest.mark.browser
def test_templates_give_what_comfyuis_own_loaders_give(comfyui, tmp_path):  # noqa: F811
    if chromium.find() is None:
        missing("no Chromium, whose editor makes a template's prompt", expected=False)
    for name in ("models/diffusion_models", "models/loras", "input", "output"):
        (tmp_path / name).mkdir(parents=True)
    names = ("image_z_image_turbo", "image_krea2_turbo_t2i")
    wanted = convert(comfyui.checkout, comfyui.python, tmp_path, names)
    with contextlib.closing(Inside(comfyui, tmp_path, SCRIPTS)) as inside:
        verdicts = {verdict.name: verdict for verdict in run_all(wanted, inside, tmp_path)}
    assert {name: verdict.outcome for name, verdict in verdicts.items()} == dict.fromkeys(names, EQUAL), json.dumps(
        [verdict.as_json() for verdict in verdicts.values()], indent=1
    )
