"""The bundled workflows fit the nodes of a running ComfyUI, in both forms."""

import json
import math

import pytest

from scripts import make_workflows
from scripts.comfyui_server import PACK
from scripts.graphs.published import NOT_PUBLISHED
from scripts.workflow_form import SEEDS
from tests.campaigns.templates.runner import MODELS, save_files
from tests.comfyui.conftest import FOLDER, mostly_full
from tests.comfyui.test_families import skip_without_class
from tests.support.requirements import missing_nodes

WORKFLOWS = PACK / "workflows"
OURS = f"custom_nodes.{FOLDER}"
NAMES = tuple(make_workflows.GRAPHS)  # in this order: those on as many ranks one after the other
BUNDLED = ("quickstart", "native_ksampler")
WITH_FILES = tuple(name for name in NAMES if name not in BUNDLED)
FLUX = "flux_dev_ulysses_pipefusion"
STAND_INS = {  # workflows whose text encoders and VAEs have no tiny files -> the case that each diffusion model is of
    "krea_2": "krea2",
    "qwen_edit_2511": "qwen-image-edit-2511",
    "qwen_image_2_1": "qwen-image-2.1-edit",
    "qwen_image_2_1_edit": "qwen-image-2.1-edit",
    "wan_2_2": "wan-2.1-t2v",
    "ltx_2_3": "ltx-2.3",
    "minimax_h3": "minimax-h3-pruned",
    "fasth3": "minimax-h3-pruned",
    "pixart_2048": "pixart-sigma",
}


def ui(name):
    return json.loads((WORKFLOWS / f"{name}.json").read_text())


def api(name):
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_model_files_can_be_downloaded(name):
    """Every loader says where its files are published, as ComfyUI's own templates do."""
    for node in json.loads((WORKFLOWS / f"{name}.json").read_text())["nodes"]:
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


def on_cpu_ranks(prompt, **widgets):
    """The graph on as many CPU ranks as it wants devices, its picture small."""
    values = {"devices": ",".join(["cpu"] * world(prompt)), "width": 128, "height": 128, "steps": 3} | widgets
    for node in prompt.values():
        node["inputs"] |= {widget: value for widget, value in values.items() if widget in node["inputs"]}
    return prompt


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


def declared(definition, given=()):
    """(name, type or list of choices, settings, whether required) of every input, in the node's order.

    given: a node's values, which say what inputs the choices of its lists bring.
    """
    for group in ("required", "optional"):
        for name, spec in definition["input"].get(group, {}).items():
            if spec[0] == GROWING:
                ((kind, settings),) = spec[1]["template"]["input"]["required"].values()
                yield f"{name}.{spec[1]['template']['names'][0]}", kind, settings, False
                continue
            yield name, spec[0], (spec[1] if len(spec) > 1 else {}), group == "required"
            if spec[0] == DYNAMIC and any(key.startswith(f"{name}.") for key in given):
                choice = next(choice for choice in spec[1]["options"] if choice["key"] == given[name])
                inner = {"input": choice["inputs"]}
                yield from ((f"{name}.{below}", *said) for below, *said in declared(inner))


def is_widget(kind, settings):
    plain = ("INT", "FLOAT", "FLOAT,INT", "STRING", "BOOLEAN", "COMBO", DYNAMIC)
    return not settings.get("forceInput") and (isinstance(kind, list) or kind in plain)


GROWING = "COMFY_AUTOGROW_V3"
"""Inputs of one kind, of which the editor shows one more than are connected."""
DYNAMIC = "COMFY_DYNAMICCOMBO_V3"
"""A list whose choices bring inputs of their own."""


def fits(value, kind, settings):
    choices = kind if isinstance(kind, list) else settings.get("options") if kind in ("COMBO", DYNAMIC) else None
    if kind == DYNAMIC:
        choices = [choice["key"] for choice in choices]
    if choices is not None:
        return value in choices
    if kind == "INT":
        return type(value) is int and settings.get("min", value) <= value <= settings.get("max", value)
    if kind in ("FLOAT", "FLOAT,INT"):
        return type(value) in (int, float)
    return isinstance(value, {"STRING": str, "BOOLEAN": bool}[kind])


QUICKSTART = ["QuickstartPrompt", "QuickstartDecode"]
"""Nodes of the bundled model, which say nothing to who looks for several GPUs."""


@pytest.mark.comfyui
def test_every_input_has_a_tooltip_and_later_ones_are_optional(definitions):
    ours = {name: node for name, node in definitions.items() if node["python_module"] == OURS}
    assert {"ParallelDiTLoader", "UlyssesConfig", "PipeFusionSampler", "ApplyPipeFusion"} <= ours.keys()
    bare = [(node, name) for node in ours for name, _, said, _ in declared(ours[node]) if len(said.get("tooltip", "")) < 10]
    assert not bare
    assert [name for name, node in ours.items() if "multi gpu" not in node["search_aliases"]] == QUICKSTART
    later = {
        "ParallelDiTLoader": {"stage_split": "auto", "compile": False},
        "UlyssesConfig": {"patch_warmup_steps": 1, "transfer_dtype": "full"},
    }
    for node, widgets in later.items():
        optional = {name: said for name, _, said, required in declared(ours[node]) if not required}
        assert {name: optional[name]["default"] for name in widgets} == widgets


@pytest.mark.comfyui
@pytest.mark.parametrize("name", NAMES)
def test_api_form_gives_every_node_what_it_needs(definitions, name):
    skip_without_nodes(definitions, name)
    prompt = api(name)
    for node in prompt.values():
        inputs = {
            n: (kind, settings, required)
            for n, kind, settings, required in declared(definitions[node["class_type"]], node["inputs"])
        }
        assert node["inputs"].keys() <= inputs.keys()
        assert {n for n, (_, _, required) in inputs.items() if required} <= node["inputs"].keys()
        for name_, value in node["inputs"].items():
            kind, settings, _ = inputs[name_]
            if is_widget(kind, settings):
                assert fits(value, kind, settings), (name_, value)
            else:
                source, slot = value
                given = definitions[prompt[source]["class_type"]]["output"][slot]
                assert kind in (given, "*"), (name_, kind, given)


@pytest.mark.comfyui
@pytest.mark.parametrize("name", NAMES)
def test_ui_form_says_the_same_as_the_api_form(definitions, name):
    skip_without_nodes(definitions, name)
    graph, prompt = ui(name), api(name)
    links = {link[0]: link for link in graph["links"]}
    nodes = {node["id"]: node for node in graph["nodes"] if node["type"] != "MarkdownNote"}
    assert {str(node_id) for node_id in nodes} == prompt.keys()
    for node_id, node in nodes.items():
        definition, expected = definitions[node["type"]], prompt[str(node_id)]["inputs"]
        assert node["type"] == prompt[str(node_id)]["class_type"]
        # The editor adds the outputs of Save Image and Preview as Text, which a file may lack.
        given = [(output["name"], output["type"]) for output in node["outputs"]]
        offered = list(zip(definition["output_name"], definition["output"], strict=True))
        assert given == (offered if node["type"] not in ("SaveImage", "PreviewAny") else [])
        widgets, sockets = list(node["widgets_values"]), {socket["name"]: socket for socket in node["inputs"]}
        found = {}
        for input_name, kind, settings, required in declared(definition, expected):
            if is_widget(kind, settings):
                if not widgets:  # an input that a later ComfyUI has given its node; the editor then shows the default
                    assert definition["python_module"] != OURS, f"{node['type']}: no value for {input_name}"
                    assert not required and "default" in settings, f"{node['type']}: no value for {input_name}"
                    continue
                found[input_name] = widgets.pop(0)
                assert bool(settings.get("control_after_generate")) == (input_name in SEEDS)
                if input_name in SEEDS:
                    assert widgets.pop(0) == "fixed"
            elif sockets[input_name]["link"] is not None:
                _, source, slot, target, index, _ = links[sockets[input_name]["link"]]
                assert (target, node["inputs"][index]["name"]) == (node_id, input_name)
                assert sockets[input_name]["link"] in nodes[source]["outputs"][slot]["links"]
                found[input_name] = [str(source), slot]
        assert not widgets
        assert found == expected


def succeed(server, prompt):
    """What the run shows. Nothing in ComfyUI's log says that a file was not as expected or a mode not possible."""
    start = server.log.stat().st_size
    outcome = server.run(prompt)
    assert outcome.status == "success", outcome.error
    assert outcome.images
    with server.log.open("rb") as log:
        log.seek(start)
        said = log.read().decode(errors="replace")
    assert "clip missing" not in said
    assert "this run is exact" not in said
    assert "Missing VAE keys ['decoder" not in said
    return outcome


@pytest.mark.comfyui
def test_bundled_workflow_runs_as_it_is(session_server):
    succeed(session_server, api("native_ksampler"))


@pytest.fixture
def with_files(session_server, bundled_workflows_models):
    return session_server


@pytest.mark.comfyui
@pytest.mark.parametrize("name", mostly_full([name for name in WITH_FILES if name not in STAND_INS], [FLUX]))
def test_workflow_for_own_files_runs_with_tiny_ones(with_files, name):
    """Its own nodes and degrees, ComfyUI's own text encoders and VAE; another prompt makes another picture."""
    first = succeed(with_files, on_cpu_ranks(api(name)))
    reports = [shown["text"][0] for shown in first.outputs.values() if "text" in shown]
    for report in reports:
        assert "pipelined in" in report
        assert report.count("\nrank ") == world(api(name))
        assert ": 0 micro-steps" not in report
    other = on_cpu_ranks(api(name), text="a red bicycle, of another length than the negative prompt")
    assert succeed(with_files, other).images != first.images


@pytest.mark.comfyui
@pytest.mark.parametrize("name", mostly_full(STAND_INS, ["minimax_h3"]))
def test_workflow_samples_with_stand_ins_for_encoders_and_vaes(comfyui, definitions, inside, base, name):
    """Its own nodes up to its samplers, whose latents are finite; of four stages three, for a model of three blocks."""
    if (case := MODELS.get(STAND_INS[name])) is not None:
        skip_without_class(comfyui, case)
    skip_without_nodes(definitions, name)
    prompt = api(name)
    for inputs in (node["inputs"] for node in prompt.values() if node["inputs"].get("pipefusion_degree") == 4):
        inputs["pipefusion_degree"] = 3
    names = [node["inputs"].get("model_name", node["inputs"].get("ckpt_name")) for node in prompt.values()]
    files = dict.fromkeys(filter(None, names), STAND_INS[name])
    save_files(files, base, inside, set())
    found, _ = inside.run("templates", prompt=prompt, files=files, loras={}, alone=True)
    assert "error" not in found["alone"], found["alone"]
    assert found["alone"]["finite"]
    assert all(largest > 0.1 for largest in found["alone"]["largest"])
