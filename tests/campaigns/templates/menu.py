"""*Run on several GPUs* on ComfyUI's own templates: chosen from the menu in a browser, queued, ended, undone; and headless.

The server is told of two cards that each hold the model, or, for every other template, that none does, so that Apply
PipeFusion is put too. On this machine ranks are on CPUs: two of them, and a mode, are set on the new nodes before they run.
PipeFusion's warm-up has all steps, since what is compared is exact.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scripts.comfyui_server import ComfyUIServer
from testing.comfyui.scripted import FORKED_RANKS, Inside
from tests.browser.editor import Editor
from tests.comfyui.conftest import FOLDER

from .conversion import Template, open_editor, without_unknown
from .files import case_of
from .runner import EQUAL, FAILED, Verdict, about, compare, loras, save_files

STAND_INS = Path(__file__).parents[2] / "comfyui" / "template_stand_ins"
PLAN = "**/parallel_dit/plan"
LACK = "no card holds the whole model"
ALL_STEPS = 1000
SECONDS = 600.0
"""Of a prompt, at most."""
SETTLE, SETTLING = 1000, 20
"""Milliseconds in which nodes whose inputs or types follow what they are connected to settle, and how often that is waited
for."""
PROMPT = "async () => (await app.graphToPrompt()).output"
SET = """([mode, steps]) => {
    for (const graph of [app.rootGraph, ...app.rootGraph.subgraphs.values()]) {
        for (const { type, widgets } of graph.nodes) {
            const values = { ParallelizeModel: { gpus: 2, mode }, ApplyPipeFusion: { warmup_steps: steps } }[type] ?? {};
            for (const widget of widgets ?? []) if (widget.name in values) widget.value = values[widget.name];
        }
    }
}"""


@dataclass(frozen=True)
class Trial:
    """What became of a template. `put`: nodes by type. `queued`: the prompt's end, with the error if it is one. `again`:
    what a second click changed; `undone`: what one undo left otherwise than it was; empty where that is nothing."""

    verdict: Verdict
    put: dict[str, int]
    queued: str
    again: str
    undone: str

    @property
    def passed(self) -> bool:
        return not self.again and not self.undone and self.queued == "success" and self.verdict.outcome == EQUAL

    def as_json(self) -> dict[str, Any]:
        return self.verdict.as_json() | {name: value for name, value in asdict(self).items() if name != "verdict"}


def try_all(
    templates: list[tuple[Template, dict[str, Any]]], checkout: Path, python: Path, inside: Inside, base: Path
) -> Iterator[Trial]:
    """Each template with its graph, one after the other. The base directory gets the files that they name."""
    from playwright import sync_api

    saved: set[str] = set()
    with (
        ComfyUIServer(checkout, base, python, packs=(FORKED_RANKS, STAND_INS), folder=FOLDER) as server,
        open_editor(server) as page,
    ):
        for number, (template, graph) in enumerate(templates):
            files = {file: case_of(file) for file in template.files()}
            save_files(files, base, inside, saved)
            server.post("/stand_ins", {"files": files, "loras": loras(template)})
            with told(page, LACK if number % 2 else ""):
                try:
                    yield try_one(Editor(page), server, template, graph, inside, files)
                except sync_api.Error as error:
                    yield Trial(Verdict(*about(template), FAILED, str(error)[:300]), {}, "no", "not tried", "not tried")


@contextmanager
def told(page: Any, pipefusion: str) -> Iterator[None]:
    """Within it the command hears of two cards, and why Apply PipeFusion belongs behind every loader."""

    def answer(route):
        response = route.fetch()
        plans = response.json()["loaders"]
        loaders = [plan | ({"pipefusion": pipefusion} if plan["takes"] else {}) for plan in plans]
        route.fulfill(response=response, json={"devices": 2, "why": "", "loaders": loaders})

    page.route(PLAN, answer)
    try:
        yield
    finally:
        page.unroute(PLAN)


def try_one(
    editor: Editor,
    server: ComfyUIServer,
    template: Template,
    graph: dict[str, Any],
    inside: Inside,
    files: dict[str, str],
) -> Trial:
    page = editor.page
    page.evaluate("graph => app.loadGraphData(graph, true, false)", graph)
    page.wait_for_timeout(SETTLE)
    native, before = page.evaluate(PROMPT), editor.saved()
    choose(editor, "success")
    after = editor.saved()
    choose(editor, "info")
    again = first_difference(after, editor.saved())
    page.keyboard.press("Control+z")
    page.wait_for_function("() => !JSON.stringify(app.rootGraph.serialize()).includes('ParallelizeModel')")
    for _ in range(SETTLING):
        if not (undone := first_difference(before, editor.saved())):
            break
        page.wait_for_timeout(SETTLE)
    choose(editor, "success")
    put = {kind: count(after, kind) - count(before, kind) for kind in ("ParallelizeModel", "ApplyPipeFusion")}
    page.evaluate(SET, ["pipefusion" if put["ApplyPipeFusion"] else "ulysses", ALL_STEPS])
    ours = page.evaluate(PROMPT)
    with page.expect_response(lambda response: response.url.endswith("/api/prompt")) as response:
        editor.run()
    queued = response.value.json()
    if "prompt_id" in queued:
        outcome = server.wait(queued["prompt_id"], SECONDS)
        said = outcome.status if outcome.status == "success" else f"{outcome.status}: {outcome.error}"
    else:
        said = f"refused: {json.dumps(queued)}"
    template = replace(template, prompt=without_unknown(native))
    return Trial(compare(template, inside, files, ours=without_unknown(ours)), put, said, again, undone)


def choose(editor: Editor, severity: str) -> None:
    """The command, until it has said something of this severity; what it had said before is gone."""
    page = editor.page
    page.evaluate("() => app.extensionManager.toast.removeAll()")
    page.locator(".p-toast-message").first.wait_for(state="detached")
    editor.menu("Parallel DiT", "Run on several GPUs")
    page.locator(f".p-toast-message-{severity}").first.wait_for()


def first_difference(before: Any, after: Any, place: str = "") -> str:
    """Where two workflows differ, empty where nowhere. What ComfyUI works out anew when it loads a workflow, which is how it
    takes a change back, is not looked at: nodes' places in the order of execution, and their least sizes."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = sorted((before.keys() | after.keys()) - {"size", "order"})
        parts = [(name, before.get(name), after.get(name)) for name in names]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        parts = [(str(index), *pair) for index, pair in enumerate(zip(before, after, strict=True))]
    else:
        return "" if before == after else f"{place}: {str(before)[:80]}, then {str(after)[:80]}"
    found = (first_difference(one, other, f"{place}/{name}") for name, one, other in parts)
    return next(filter(None, found), "")


def count(saved: dict[str, Any], kind: str) -> int:
    graphs = [saved, *(saved.get("definitions") or {}).get("subgraphs", [])]
    return sum(node["type"] == kind for graph in graphs for node in graph["nodes"])
