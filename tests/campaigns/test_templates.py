"""The campaign of templates: what it makes of figures, and two templates from end to end."""

import contextlib
import json

import pytest

from testing.comfyui.scripted import INSIDE, Inside
from tests.campaigns.templates.conversion import Template, convert
from tests.campaigns.templates.files import CASES
from tests.campaigns.templates.runner import DIFFERS, EQUAL, FAILED, NOT_OURS, NOT_RUN, REFUSED, judge, run_all
from tests.comfyui.conftest import SCRIPTS, comfyui  # noqa: F401 (a fixture)
from tests.support import chromium
from tests.support.requirements import missing

ABOUT = ("name", "title", 10, ("file",))


def found(ours, itself=(1e-6,)):
    return {"native": {}, "native itself": list(itself), "ours": ours}


@pytest.mark.parametrize(
    ("results", "outcome"),
    [
        (found([4e-5, 1e-6]), EQUAL),
        (found([2e-4], itself=[3e-5]), EQUAL),
        (found([6e-5]), DIFFERS),
        (found([float("inf")], itself=[float("inf")]), DIFFERS),
        (found({"error": "RuntimeError: ...\nKSampler: ValueError model: not here"}), REFUSED),
        (found({"error": "RuntimeError: ...\nKSampler: KeyError 'x'"}), FAILED),
        ({"native": {"error": "RuntimeError: no such file"}}, NOT_RUN),
    ],
)
def test_a_verdict(results, outcome):
    assert judge(ABOUT, results).outcome == outcome


def test_a_template_of_no_family_is_not_started():
    prompt = {"1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "sd_xl_base_1.0.safetensors"}}}
    (verdict,) = run_all([Template("sdxl", "SDXL", 30, prompt)], inside=None, base=None)
    assert (verdict.outcome, verdict.reason) == (NOT_OURS, "sd_xl_base_1.0.safetensors: a UNet of Stable Diffusion's kind")


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
