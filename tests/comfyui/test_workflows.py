"""The bundled workflows fit the nodes of a running ComfyUI, in both forms."""

import json
import math

import pytest

from scripts import make_workflows
from scripts.comfyui_server import PACK
from scripts.graphs.published import NOT_PUBLISHED
from tests.campaigns.templates.runner import save_files
from tests.comfyui.conftest import mostly_full
from tests.support.requirements import missing_nodes

WORKFLOWS = PACK / "workflows"
NAMES = tuple(make_workflows.GRAPHS)  # in this order: those on as many ranks one after the other
BUNDLED = ("quickstart", "native_ksampler")
WITH_FILES = tuple(name for name in NAMES if name not in BUNDLED)
STAND_INS = {  # workflow -> the small model that each of its diffusion models is
    **dict.fromkeys(("flux_schnell_pipefusion", "flux_dev_ulysses_pipefusion", "flux_dev_displaced"), "flux-dev"),
    "parallelize_model": "flux-dev",
    "sd3_split_batch": "sd3.5-large",
    "krea_2": "krea2",
    "qwen_edit_2511": "qwen-image-edit-2511",
    "qwen_image_2_1": "qwen-image-2.1-edit",
    "qwen_image_2_1_edit": "qwen-image-2.1-edit",
    "wan_2_2": "wan-2.1-t2v",
    "wan_animate_2": "wan-animate-2",
    "ltx_2_3": "ltx-2.3",
    "minimax_h3": "minimax-h3-pruned",
    "fasth3": "minimax-h3-pruned",
    "pixart_2048": "pixart-sigma",
    "z_image_turbo_ring": "z-image",
    "flux_2_dev_tensor": "flux2-dev",
}


def ui(name):
    return json.loads((WORKFLOWS / f"{make_workflows.FILES[name]}.json").read_text())


def api(name):
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_model_files_can_be_downloaded(name):
    """Every loader says where its files are published, as ComfyUI's own templates do."""
    for node in ui(name)["nodes"]:
        values = node["widgets_values"] if node["type"] != "MarkdownNote" else []
        files = [value for value in values if str(value).endswith(".safetensors") and value not in NOT_PUBLISHED]
        models = node["properties"].get("models", [])
        assert [model["name"] for model in models] == files
        for model in models:
            assert model.keys() == {"name", "url", "directory"}
            assert model["url"].startswith("https://huggingface.co/") and model["url"].endswith(f"/{model['name']}")
            assert "/resolve/main/" in model["url"]


def world(prompt):
    """Devices that the graph is made for: the product of the degrees of a loader, which are those of every other."""
    degrees = {
        widget: value
        for node in prompt.values()
        for widget, value in node["inputs"].items()
        if widget.endswith("_degree") or widget == "gpus"
    }
    return math.prod(degrees.values())


def test_committed_files_are_what_the_script_writes():
    written = {str(path.relative_to(WORKFLOWS)): path.read_text() for path in WORKFLOWS.rglob("*.json")}
    assert written == make_workflows.files()


@pytest.mark.parametrize("name", NAMES)
def test_the_note_names_every_file_and_the_number_of_gpus(name):
    note = next(node["widgets_values"][0] for node in ui(name)["nodes"] if node["type"] == "MarkdownNote")
    files = [
        value
        for node in api(name).values()
        for widget, value in node["inputs"].items()
        if widget.endswith("_name") or "clip_name" in widget
        if widget != "sampler_name" and "(bundled)" not in str(value)
    ]
    assert bool(files) == (name in WITH_FILES)
    for file in files:
        assert file.removesuffix(".safetensors") in note
    if files:
        assert "your own files" in note
        assert f"Made for **{world(api(name))} GPUs**" in note


@pytest.fixture(scope="module")
def definitions(session_server, bundled_workflows_models):
    return session_server.object_info()


def skip_without_nodes(definitions, name):
    missing_nodes(definitions, (node["class_type"] for node in api(name).values()))


@pytest.fixture(scope="module")
def refusals(inside, bundled_workflows_models):
    return inside.run("workflows", prompts={name: api(name) for name in NAMES})[0]


@pytest.mark.comfyui
@pytest.mark.parametrize("name", NAMES)
def test_api_form_gives_every_node_what_it_needs(definitions, refusals, name):
    """tests/browser opens the other form in ComfyUI's editor."""
    skip_without_nodes(definitions, name)
    assert refusals[name] in ([None, {}], [None, []])


@pytest.mark.comfyui
def test_bundled_workflow_runs_as_it_is(session_server):
    """Nothing in ComfyUI's log says that a file was not as expected or a mode not possible."""
    start = session_server.log.stat().st_size
    outcome = session_server.run(api("native_ksampler"))
    assert outcome.status == "success", outcome.error
    assert outcome.images
    said = session_server.log.read_bytes()[start:].decode(errors="replace")
    assert "this run is exact" not in said
    assert "Missing VAE keys ['decoder" not in said


@pytest.mark.comfyui
@pytest.mark.parametrize("name", mostly_full(STAND_INS, ["minimax_h3", "flux_dev_ulysses_pipefusion"]))
def test_workflow_samples_with_stand_ins_for_encoders_and_vaes(comfyui, definitions, inside, base, name):
    """Its own nodes up to its samplers, whose latents are finite; of four stages three, for a model of three blocks."""
    skip_without_nodes(definitions, name)
    prompt = api(name)
    for inputs in (node["inputs"] for node in prompt.values() if node["inputs"].get("pipefusion_degree") == 4):
        inputs["pipefusion_degree"] = 3
    inputs = {(key, value) for node in prompt.values() for key, value in node["inputs"].items() if isinstance(value, str)}
    files = {value: STAND_INS[name] for key, value in inputs if key in ("model_name", "ckpt_name", "unet_name")}
    loras = {value: next(iter(files)) for key, value in inputs if key == "lora_name"}
    save_files(files, base, inside, set())
    found, _ = inside.run("templates", prompt=prompt, files=files, loras=loras, alone=True)
    assert found["alone"]["finite"]
    assert all(largest > 0.1 for largest in found["alone"]["largest"])
