"""The menu: its commands keep every wire, in each editor and for all ways that a MODEL takes; undo; what they say."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.editor import Editor
from tests.browser.shapes import CHECKPOINT, SHAPES, workflow

pytestmark = [pytest.mark.browser, pytest.mark.comfyui]

OURS = ("ParallelizeModel", "ApplyPipeFusion")
PUT, TAKE_OUT = "ParallelDiT.RunOnSeveralGPUs", "ParallelDiT.RunOnOneGPU"
PLAN = "**/parallel_dit/plan"


@pytest.fixture(scope="module")
def on_two_cards(editor) -> Iterator[Editor]:
    """The menu's commands are told of two cards that each hold half of a model."""

    def told(route):
        asked = json.loads(route.request.post_data)["loaders"]
        response = route.fetch()
        loaders = response.json()["loaders"]
        for loader, plan in zip(asked, loaders, strict=True):
            plan["takes"] |= loader["inputs"].get("ckpt_name") == CHECKPOINT
            plan["pipefusion"] = "no GPU holds the whole model" if plan["takes"] else ""
        cards = [{"name": f"cuda:{index}", "memory": 24 * 10**9} for index in range(2)]
        route.fulfill(response=response, json={"devices": 2, "cards": cards, "why": "", "loaders": loaders})

    editor.page.route(PLAN, told)
    yield editor
    editor.page.unroute(PLAN)


def without_ours(prompt: dict[str, Any]) -> dict[str, Any]:
    """A prompt as it would be if each node of OURS gave out what it is given."""

    def passed(value: Any) -> Any:
        while isinstance(value, list) and prompt[value[0]]["class_type"] in OURS:
            value = prompt[value[0]]["inputs"]["model"]
        return value

    return {
        number: node | {"inputs": {name: passed(value) for name, value in node["inputs"].items()}}
        for number, node in prompt.items()
        if node["class_type"] not in OURS
    }


def said(editor: Editor, command: str) -> str:
    """What a command of the menu says at its end."""
    return editor.page.evaluate(
        """async command => {
            const { toast } = app.extensionManager, said = [], add = toast.add;
            toast.add = ({ detail }) => said.push(detail);
            try { await app.extensionManager.command.execute(command); } finally { toast.add = add; }
            return said.join(" ");
        }""",
        command,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_menu_keeps_every_wire(on_two_cards, shape):
    editor = on_two_cards
    graph = workflow(shape)
    editor.load(graph)
    before, file = editor.prompt(), editor.saved()
    assert without_ours(before) == before
    assert "Undo reverts it." in said(editor, PUT)
    after = editor.prompt()
    assert without_ours(after) == before
    loads = [number for number, node in after.items() if node["class_type"] in ("UNETLoader", "CheckpointLoaderSimple")]
    behind = [node["class_type"] for node in after.values() if node["inputs"].get("model", [None])[0] in loads]
    assert behind and set(behind) == {OURS[0]}
    editor.undo()
    assert editor.saved() == file
    editor.redo()
    assert editor.prompt() == after
    assert "Undo reverts it." in said(editor, TAKE_OUT)
    assert editor.prompt() == before
    editor.undo()
    assert editor.prompt() == after


def test_move_in(on_two_cards):
    """Another pack's loader, which this ComfyUI does not have: as ComfyUI's own, and with Parallelize Model behind it."""
    editor = on_two_cards
    graph = workflow("into_a_subgraph")
    editor.load(graph)
    said(editor, PUT)
    wanted = editor.prompt()
    graph = json.loads(
        json.dumps(graph).replace('"UNETLoader"', '"UNETLoaderMultiGPU"').replace('"default"]', '"default", "cuda:1"]')
    )
    editor.load(graph)
    editor.page.keyboard.press("Escape")  # the editor says which nodes are missing
    told = said(editor, "ParallelDiT.MoveIn")
    assert told.startswith(
        "A new workflow has ComfyUI's own nodes in place of: UNETLoaderMultiGPU. Parallelize Model is now"
    )
    assert editor.prompt() == wanted


def test_run_on_one_gpu_again_where_a_subgraphs_input_feeds_the_node(on_two_cards):
    editor = on_two_cards
    editor.load(workflow("into_a_subgraph", ours_inside=True))
    before = editor.prompt()
    assert without_ours(before) != before
    said(editor, TAKE_OUT)
    assert editor.prompt() == without_ours(before)


@pytest.mark.parametrize("fault", ["connect = () => null", "connect = () => { throw new Error('no connect') }"])
def test_a_change_that_would_lose_a_wire_is_taken_back(on_two_cards, fault):
    editor = on_two_cards
    editor.load(workflow("out_of_a_subgraph"))
    file = editor.saved()
    editor.page.evaluate(f"() => {{ window.kept = LGraphNode.prototype.connect; LGraphNode.prototype.{fault} }}")
    try:
        told = said(editor, PUT)
    finally:
        editor.page.evaluate("() => { LGraphNode.prototype.connect = window.kept }")
    names = "no connect" if "throw" in fault else "this editor would lose the wire to KSampler"
    assert told == f"Nothing was changed: {names}. Please report it, and connect the nodes by hand."
    assert editor.saved() == file


def test_run_on_several_gpus_in_a_templates_subgraph_and_undo(on_two_cards, server, shoot):
    """One of ComfyUI's own templates, by clicks. Such MODELs are run by tests/comfyui/test_parallelize.py."""
    editor, page = on_two_cards, on_two_cards.page
    text = server.get("/templates/flux_dev_checkpoint_example.json").decode()
    editor.load(json.loads(text.replace("t5xxl_fp16", "t5xxl_fp8_e4m3fn")))  # a file that is there
    page.wait_for_function("() => app.rootGraph.subgraphs.size == 1")
    editor.look_inside()  # its first time changes the saved file
    shoot("run-on-several-gpus-1")
    editor.look_inside(False)
    before = editor.saved()
    loader = "Load Diffusion Model (flux1-dev.safetensors) in Text to Image (Flux.1 Dev)"
    editor.menu("Parallel DiT", "Explain this workflow")
    cards = "cuda:0 (24.0 GB), cuda:1 (24.0 GB)"
    page.get_by_text(
        re.compile(rf"{re.escape(loader)}: \d+ MB of weights on {re.escape(cards)}\. Parallel")
    ).first.wait_for()
    assert editor.saved() == before
    editor.menu("Parallel DiT", "Run on several GPUs")
    as_told = "and Apply PipeFusion, because no GPU holds the whole model"
    editor.toast(f"Parallelize Model is now behind {loader}, {as_told}. Undo reverts it.")
    behind = ["ApplyPipeFusion", "ParallelizeModel", "UNETLoader"]
    assert editor.model_of("KSampler") == behind
    page.keyboard.press("Control+z")
    page.wait_for_function("() => app.rootGraph.subgraphs.values().next().value.nodes.length == 8")
    assert editor.saved() == before
    editor.clear_toasts()
    command = editor.open_menu("Parallel DiT", "Run on several GPUs")
    shoot("run-on-several-gpus-2")
    command.click()
    page.wait_for_function("() => app.rootGraph.subgraphs.values().next().value.nodes.length == 10")
    editor.look_inside()
    shoot("run-on-several-gpus-3")
    editor.clear_toasts()
