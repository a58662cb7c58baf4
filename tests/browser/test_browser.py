"""The pack in ComfyUI's own editor, in a real browser: the bundled workflows, a run, progress, help pages.

PARALLEL_DIT_SCREENSHOTS: a folder to put screenshots into, such as those of docs/images.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.comfyui_server import PACK
from scripts.make_workflows import FILES, GRAPHS
from tests.browser.editor import READY, RUN_SECONDS, SETTLE, Editor
from tests.comfyui.conftest import FOLDER
from tests.support.requirements import missing_nodes

pytestmark = [pytest.mark.browser, pytest.mark.comfyui]

IN_VIEW = 8
"""Templates whose pictures the dialog shows without scrolling."""
OURS = json.loads((PACK / "locales" / "en" / "nodeDefs.json").read_text()).keys()


def workflow(name: str) -> dict[str, Any]:
    return json.loads((PACK / "workflows" / f"{FILES[name]}.json").read_text())


def first_sentence(page: Path) -> str:
    """The beginning of a help page's text, as the panel shows it."""
    return re.sub(r"[`*]", "", re.split(r"[.:：。]", page.read_text().splitlines()[1])[0])


@pytest.mark.parametrize("name", GRAPHS)
def test_workflow_opens_with_the_values_of_its_file(editor, server, name):
    graph = workflow(name)
    missing_nodes(server.object_info(), (node["type"] for node in graph["nodes"] if node["type"] != "MarkdownNote"))
    editor.open(graph)
    assert not editor.problems()
    for node in graph["nodes"]:
        values = editor.page.evaluate("id => (app.graph.getNodeById(id).widgets ?? []).map(w => w.value)", node["id"])
        assert values[: len(node["widgets_values"])] == node["widgets_values"], node["type"]
        size = editor.page.evaluate("id => [...app.graph.getNodeById(id).size]", node["id"])
        assert size == node["size"], f"{node['type']} does not fit into its size, so it may overlap others"


@pytest.fixture(scope="module")
def from_templates(editor, shoot) -> Editor:
    """quickstart, opened by clicks through the Templates dialog, after another one."""
    page = editor.page
    page.reload()
    page.wait_for_function(READY)
    for name in ("flux_dev_ulysses_pipefusion", "quickstart"):
        page.get_by_role("button", name="Templates", exact=True).click()
        page.get_by_role("dialog").get_by_text(FOLDER, exact=True).click()
        card = page.get_by_test_id(f"template-workflow-{FILES[name]}")
        card.wait_for()
        page.wait_for_function(
            """([count, seen]) => {
                const all = selector => [...document.querySelectorAll(`[data-testid^=template-workflow-]${selector}`)];
                const pictures = all(' img');  // those below what the window shows come when it is scrolled to them
                return all('').length == count && pictures.length >= seen
                    && pictures.every(picture => picture.naturalWidth == 512);
            }""",
            arg=[len(GRAPHS), IN_VIEW],
        )
        cards = page.locator("[data-testid^=template-workflow-]").evaluate_all("all => all.map(card => card.dataset.testid)")
        assert cards == [f"template-workflow-{file}" for file in FILES.values()]
        shoot("templates")
        card.click()
        for _ in range(20):  # on a busy machine the page may lose a click while the dialog is still being built
            page.wait_for_timeout(500)
            if not card.count():
                break
        else:
            card.click()
        card.wait_for(state="detached")
        editor.shows(workflow(name))
    return editor


def wait_for_report(editor, text: str) -> None:
    """Until a text on the canvas contains `text`."""
    editor.page.wait_for_function(
        "text => [...document.querySelectorAll('textarea')].some(area => area.value.includes(text))",
        arg=text,
        timeout=1000 * RUN_SECONDS,
    )


def test_run_with_progress_then_with_other_degrees(from_templates, server, shoot):
    editor, page = from_templates, from_templates.page
    page.evaluate(
        """() => {
            const sampler = app.graph._nodes.find(n => n.type == 'PipeFusionSampler');
            window.progress = new Set();
            let told = {};  // loading has a bar of its own before, in percent
            window.comfyAPI.api.api.addEventListener("progress", event => { told = event.detail; });
            const shown = () => told.max == 20 && sampler.progress == told.value / told.max;
            setInterval(() => shown() && window.progress.add(sampler.progress), 10);
        }"""
    )
    editor.run()
    page.wait_for_function("() => Math.max(...window.progress) > 0.4", timeout=1000 * RUN_SECONDS)
    picture = editor.shown_picture(server)
    assert picture.size == (256, 256)
    low, high = picture.convert("L").getextrema()
    assert high - low > 200
    wait_for_report(editor, "pipefusion_degree 2")
    seen = sorted(page.evaluate("() => [...window.progress]"))
    assert len(seen) > 3
    assert all(round(20 * value, 6) == round(20 * value) for value in seen), "steps of 20"
    shoot("quickstart-workflow")

    before = page.evaluate("() => app.graph._nodes.find(n => n.type == 'SaveImage').imgs[0].src")
    editor.set("ParallelDiTLoader", "pipefusion_degree", 1)
    editor.set("ParallelDiTLoader", "split_batch_degree", 2)
    editor.set("PipeFusionSampler", "steps", 4)
    editor.run()
    wait_for_report(editor, "split_batch_degree 2")
    assert editor.shown_picture(server, before).size == (256, 256)
    assert not editor.problems()


def test_the_panel_shows_ranks_while_it_is_open(editor, shoot):
    """Behind the run above: ranks are there. A page whose panel is closed asks nothing."""
    page, asked = editor.page, []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/parallel_dit/ranks") else None)
    tab = editor.tab("parallel-dit-ranks")
    panel = page.locator(".pdit")
    tab.click()
    panel.get_by_text("quickstart-digits").first.wait_for()
    assert panel.locator(".row > .bar").count() == 2
    panel.get_by_text("idle").nth(1).wait_for()
    shoot("ranks-panel")
    panel.get_by_role("button", name="Add Trace").click()
    assert page.evaluate("() => app.graph.nodes.filter(node => node.type == 'ParallelTrace').length") == 1
    page.evaluate("() => app.graph.remove(app.graph.nodes.find(node => node.type == 'ParallelTrace'))")
    panel.get_by_role("button", name="Unload").click()
    panel.get_by_text("no model").wait_for()
    tab.click()
    panel.wait_for(state="detached")
    page.wait_for_timeout(1500)
    count = len(asked)
    editor.run()
    page.wait_for_timeout(4000)
    assert len(asked) == count > 0
    page.wait_for_function("() => !app.ui.lastQueueSize", timeout=1000 * RUN_SECONDS)


def test_degrees_that_do_not_fit_are_refused_at_the_widget(editor, shoot):
    """A control of the run before: `devices` has more entries than the degrees need."""
    editor.open(workflow("quickstart"))
    editor.set("ParallelDiTLoader", "pipefusion_degree", 1)
    editor.run()
    editor.page.get_by_text("Parallel DiT Loader rejected the value for devices").first.wait_for()
    line = "the product of the degrees must equal the number of devices"
    editor.page.wait_for_function(
        "line => app.graph._nodes.some(n => (n.widgets ?? []).some(w => String(w.value).includes(line)))", arg=line
    )
    editor.page.wait_for_timeout(SETTLE)  # the toast appears slowly
    shoot("error-on-a-node")


@pytest.mark.parametrize(("node", "raised", "shown"), [("ParallelDoctor", "torch", 1), ("KSampler", "torch", 0)])
def test_the_first_line_of_our_errors_is_on_the_node(editor, node, raised, shown):
    """Of our nodes, and of others that our code ends."""
    found = editor.page.evaluate(
        """async ([kind, raised]) => {
            const api = window.comfyAPI.api.api, node = LiteGraph.createNode(kind);
            app.graph.add(node);
            const traceback = ["parallel-dit", raised].map(pack => `  File "/x/custom_nodes/${pack}/a.py", line 1`);
            const detail = { node_id: node.id, node_type: kind, exception_message: "model: why.\\nmore", traceback };
            api.dispatchEvent(new CustomEvent("execution_error", { detail }));
            await new Promise(done => setTimeout(done, 600));
            const lines = node.widgets.map(widget => widget.value).filter(value => value == "model: why.");
            app.graph.remove(node);
            return lines.length;
        }""",
        [node, raised],
    )
    assert found == shown


def test_a_report_is_shown_in_a_box_on_its_node(editor):
    shown = editor.page.evaluate(
        """() => {
            const node = LiteGraph.createNode("ParallelDoctor");
            app.graph.add(node);
            const saved = node.serialize().widgets_values.length;
            node.onExecuted({ text: ["first\\nlast"] });
            const values = node.widgets.map(widget => widget.value);
            app.graph.remove(node);
            return [values.includes("first\\nlast"), saved];
        }"""
    )
    assert shown == [True, 5]  # the box is no widget of the saved workflow


def test_help_panel_has_the_nodes_page(editor, shoot):
    graph = workflow("quickstart")
    editor.open(graph)
    for kind in sorted({node["type"] for node in graph["nodes"]} & OURS):
        editor.help(kind)
        text = first_sentence(PACK / "web" / "docs" / f"{kind}.md")
        editor.page.get_by_text(text).first.wait_for()
    shoot("help-panel")
