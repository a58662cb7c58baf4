"""The bundled workflows fit the nodes of a running ComfyUI, in both forms."""

import itertools
import json

import pytest

from scripts import make_workflows
from scripts.comfyui_server import PACK, PACK_FOLDER

WORKFLOWS = PACK / "workflows"
NAMES = sorted(make_workflows.GRAPHS)


def ui(name):
    return json.loads((WORKFLOWS / f"{name}.json").read_text())


def api(name):
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text())


def test_committed_files_are_what_the_script_writes():
    written = {str(path.relative_to(WORKFLOWS)): path.read_text() for path in WORKFLOWS.rglob("*.json")}
    assert written == make_workflows.files()


@pytest.mark.parametrize("name", NAMES)
def test_nodes_do_not_overlap(name):
    title, gap = 30, 10
    boxes = [
        (x - gap, y - title - gap, x + width, y + height)
        for (x, y), (width, height) in ((node["pos"], node["size"]) for node in ui(name)["nodes"])
    ]
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)


@pytest.fixture(scope="module")
def definitions(session_server):
    return session_server.object_info()


def declared(definition):
    """(name, type or list of choices, settings, whether required) of every input, in the node's order."""
    for group in ("required", "optional"):
        for name, spec in definition["input"].get(group, {}).items():
            yield name, spec[0], (spec[1] if len(spec) > 1 else {}), group == "required"


def is_widget(kind, settings):
    return not settings.get("forceInput") and (
        isinstance(kind, list) or kind in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
    )


def fits(value, kind, settings):
    choices = kind if isinstance(kind, list) else settings.get("options") if kind == "COMBO" else None
    if choices is not None:
        return value in choices
    if kind == "INT":
        return type(value) is int and settings.get("min", value) <= value <= settings.get("max", value)
    if kind == "FLOAT":
        return type(value) in (int, float)
    return isinstance(value, {"STRING": str, "BOOLEAN": bool}[kind])


@pytest.mark.comfyui
def test_every_input_has_a_tooltip_and_later_ones_are_optional(definitions):
    ours = {name: node for name, node in definitions.items() if node["python_module"] == f"custom_nodes.{PACK_FOLDER}"}
    assert {"ParallelDiTLoader", "UlyssesConfig", "PipeFusionSampler", "ApplyPipeFusion"} <= ours.keys()
    bare = [(node, name) for node in ours for name, _, said, _ in declared(ours[node]) if len(said.get("tooltip", "")) < 10]
    assert not bare
    later = {"ParallelDiTLoader": {"stage_split": "auto"}, "UlyssesConfig": {"patch_warmup_steps": 1}}
    for node, widgets in later.items():
        optional = {name: said for name, _, said, required in declared(ours[node]) if not required}
        assert {name: optional[name]["default"] for name in widgets} == widgets


@pytest.mark.comfyui
@pytest.mark.parametrize("name", NAMES)
def test_api_form_gives_every_node_what_it_needs(definitions, name):
    prompt = api(name)
    for node in prompt.values():
        inputs = {n: (kind, settings, required) for n, kind, settings, required in declared(definitions[node["class_type"]])}
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
    graph, prompt = ui(name), api(name)
    links = {link[0]: link for link in graph["links"]}
    nodes = {node["id"]: node for node in graph["nodes"] if node["type"] != "MarkdownNote"}
    assert {str(node_id) for node_id in nodes} == prompt.keys()
    for node_id, node in nodes.items():
        definition, expected = definitions[node["type"]], prompt[str(node_id)]["inputs"]
        assert node["type"] == prompt[str(node_id)]["class_type"]
        # Save Image and Preview as Text have gained outputs since 0.3.64; the editor adds those that a file lacks.
        given = [(output["name"], output["type"]) for output in node["outputs"]]
        offered = list(zip(definition["output_name"], definition["output"], strict=True))
        assert given == (offered if node["type"] not in ("SaveImage", "PreviewAny") else [])
        widgets, sockets = list(node["widgets_values"]), {socket["name"]: socket for socket in node["inputs"]}
        found = {}
        for input_name, kind, settings, required in declared(definition):
            if is_widget(kind, settings):
                if not widgets:  # a workflow from before this input existed; the editor then shows the default
                    assert not required and "default" in settings, f"{node['type']}: no value for {input_name}"
                    continue
                found[input_name] = widgets.pop(0)
                if settings.get("control_after_generate"):
                    assert widgets.pop(0) == "fixed"
            elif sockets[input_name]["link"] is not None:
                _, source, slot, target, index, _ = links[sockets[input_name]["link"]]
                assert (target, node["inputs"][index]["name"]) == (node_id, input_name)
                assert sockets[input_name]["link"] in nodes[source]["outputs"][slot]["links"]
                found[input_name] = [str(source), slot]
        assert not widgets
        assert found == expected


@pytest.mark.comfyui
@pytest.mark.parametrize("name", NAMES)
def test_bundled_workflow_runs_as_it_is(session_server, name):
    outcome = session_server.run(api(name))
    assert outcome.status == "success", outcome.error
    assert outcome.images
