"""Shipped plans serve the calls that ComfyUI's samplers make of published models, and a new trial finds the same."""

import json

import pytest

from parallel_backend.own_class.plans.plan import NAME, PLANS
from scripts.make_plans import all_made, version_of
from tests.support.requirements import missing

pytestmark = pytest.mark.comfyui
DEFAULT = "wan-2.2-t2v-14b", "flux-dev", "qwen-image"
FILES = [json.loads(path.read_text()) for path in PLANS.glob("*.json")]
NAMES = sorted({plan["name"] for file in FILES for plan in file[NAME]})
SHIPPED = " by its shipped plan"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name != DEFAULT[0] else ()) for name in NAMES]
)
def test_the_call_of_a_published_model_needs_no_trial(comfyui, inside, name):
    if {version_of(comfyui.checkout)} != (versions := {file["made with ComfyUI"] for file in FILES}):
        missing(f"plans are made with ComfyUI {', '.join(versions)}", expected=False)
    found = inside.run("served", names=[name])[0][name]
    assert (found["how"], found["shared"]) == (SHIPPED, found["run"])
    assert found["run"] >= 0.75 * found["blocks"]


@pytest.mark.full
@pytest.mark.parametrize("name", DEFAULT)
def test_a_new_trial_finds_the_same(comfyui, name):
    ((_, made),) = all_made(comfyui.checkout, [name])
    shipped = json.loads((PLANS / made["file"]).read_text())[NAME]
    assert made["plans"] == [plan for plan in shipped if plan["name"] == name]
