"""ComfyUI's editor in a browser, as tests use it."""

import io
from itertools import pairwise
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from PIL import Image

from scripts.comfyui_server import ComfyUIServer

READY = "() => window.app?.canvas && window.LiteGraph?.registered_node_types.ParallelDiTLoader && app.graph._nodes.length"

SETTLE = 300
"""Milliseconds."""
RUN_SECONDS = 300
"""Limit of a run, for a machine whose cores are shared."""


class Editor:
    """ComfyUI's page, and where the graph's nodes and widgets are on it."""

    def __init__(self, page):
        self.page = page

    def node(self, kind: str, expression: str) -> Any:
        """A JavaScript expression of `node`, the first one of this type."""
        find = "const node = app.graph._nodes.find(n => n.type == kind)"
        return self.page.evaluate(f"kind => {{ {find}; return {expression} }}", kind)

    def open(self, graph: dict[str, Any]) -> None:
        self.page.evaluate("graph => app.loadGraphData(graph)", graph)
        self.shows(graph)

    def load(self, graph: dict[str, Any]) -> None:
        """Open a workflow, and wait until nodes that follow what they are connected to have settled."""
        self.page.evaluate("graph => app.loadGraphData(graph)", graph)
        self.page.wait_for_timeout(SETTLE)

    def prompt(self) -> dict[str, Any]:
        """The prompt that Run would send."""
        return self.page.evaluate("async () => (await app.graphToPrompt()).output")

    def undo(self) -> None:
        self._history("Undo")

    def redo(self) -> None:
        self._history("Redo")

    def _history(self, command: str) -> None:
        self.page.evaluate("command => app.extensionManager.command.execute(command)", f"Comfy.{command}")
        self.page.wait_for_timeout(SETTLE)

    def shows(self, graph: dict[str, Any]) -> None:
        """Wait until the canvas has this workflow's nodes, and is drawn."""
        kinds = [node["type"] for node in graph["nodes"]]
        self.page.wait_for_function("kinds => app.graph._nodes.map(n => n.type).join() == kinds.join()", arg=kinds)
        self.page.wait_for_function("() => app.graph._nodes.every(n => !n.widgets?.length || n.widgets[0].last_y != null)")
        self.page.evaluate(
            """async () => {
                await document.fonts.ready;
                const view = () => [app.canvas.ds.scale, ...app.canvas.ds.offset].join();
                for (let seen = view(), same = 0; same < 8; seen = view()) {
                    await new Promise(done => setTimeout(done, 50));
                    same = view() == seen ? same + 1 : 0;
                }
                app.canvas.draw(true, true);
            }"""
        )

    def click(self, kind: str, x: str, y: str) -> None:
        """A mouse click on the canvas at this place of a node, in its own coordinates."""
        place = (
            f"(() => {{ const {{ scale, offset }} = app.canvas.ds, box = app.canvas.canvas.getBoundingClientRect(); "
            f"return [box.left + (node.pos[0] + ({x}) + offset[0]) * scale, "
            f"box.top + (node.pos[1] + ({y}) + offset[1]) * scale] }})()"
        )
        self.page.mouse.click(*self.node(kind, place))

    def set(self, kind: str, name: str, value: Any) -> None:
        self.node(kind, f"node.widgets.find(w => w.name == {name!r}).value = {value!r}")

    def help(self, kind: str) -> None:
        """Select the node by its title, and press the selection's info button."""
        self.click(kind, "60", "-15")
        self.page.wait_for_function("kind => Object.values(app.canvas.selected_nodes)[0]?.type == kind", arg=kind)
        self.page.get_by_test_id("info-button").click()

    def run(self) -> None:
        self.page.get_by_test_id("queue-button").click()

    def tab(self, name: str) -> Any:
        """The button of a tab of the sidebar: by its class, in newer editors by its test id."""
        return self.page.locator(f".{name}-tab-button, [data-testid={name}-tab-button]")

    def look_inside(self, inside: bool = True) -> None:
        """Show the only subgraph's nodes, or the workflow's."""
        inner = "app.rootGraph.subgraphs.values().next().value"
        self.page.evaluate("() => { app.canvas.min_font_size_for_lod = 0 }")  # texts at any zoom
        self.page.evaluate(f"inside => app.canvas.setGraph(inside ? {inner} : app.rootGraph)", inside)
        self.page.wait_for_timeout(SETTLE)
        self.page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        self.page.wait_for_timeout(3 * SETTLE)  # it moves the view slowly

    def clear_toasts(self) -> None:
        self.page.evaluate("() => app.extensionManager.toast.removeAll()")
        self.page.wait_for_timeout(SETTLE)

    def problems(self) -> list[str]:
        """Nodes that ComfyUI does not know, that are marked red, or whose list lacks the file's choice."""
        return self.page.evaluate(
            """() => app.graph._nodes.flatMap(n => [
                ...(n.type in LiteGraph.registered_node_types ? [] : [`unknown ${n.type}`]),
                ...(n.has_errors ? [`error ${n.type}`] : []),
                ...(n.widgets ?? []).filter(w => w.type == 'combo' && Array.isArray(w.options.values)
                    && !w.options.values.includes(w.value)).map(w => `${n.type}: no ${w.value} in ${w.name}`),
            ])"""
        )

    def open_menu(self, *path: str) -> Any:
        """ComfyUI's menu, open at this command, under which the pointer is: what can be clicked."""
        items = [self.page.get_by_role("menuitem", name=name, exact=True) for name in path]
        for _ in range(5):  # a click on the button closes a menu that an earlier command has not closed yet
            self.page.keyboard.press("Escape")
            self.page.get_by_role("menuitem").first.wait_for(state="detached")
            self.page.locator(".comfy-menu-button-wrapper, [data-testid=comfy-menu-button]").click()
            if all(self._opens(item, inside) for item, inside in pairwise(items)):
                break
        items[-1].hover()
        return items[-1]

    def _opens(self, item: Any, inside: Any) -> bool:
        """Whether what is inside a menu's item becomes visible under a pointer that moves over the item."""
        for moved in range(20):  # a pointer that comes before the item listens to it opens nothing until it moves
            if inside.is_visible():
                return True
            if item.is_visible():
                item.hover(position={"x": 5 + moved, "y": 5})
            self.page.wait_for_timeout(500)
        return False

    def menu(self, *path: str) -> None:
        command = self.open_menu(*path)
        command.click()
        command.wait_for(state="detached")

    def saved(self) -> dict[str, Any]:
        """The open workflow as a file would have it, without where one looks at it from."""
        graph = self.page.evaluate("() => app.rootGraph.serialize()")
        return {name: value for name, value in graph.items() if name != "extra"}

    def model_of(self, kind: str) -> list[str]:
        """Types of the nodes that a node's model comes through, the loader last."""
        prompt = self.prompt()
        node = next(node for node in prompt.values() if node["class_type"] == kind)
        found = []
        while "model" in node["inputs"]:
            node = prompt[node["inputs"]["model"][0]]
            found.append(node["class_type"])
        return found

    def toast(self, text: str) -> None:
        """Wait until a corner of the page says this. Newer editors have the text once more, for screen readers."""
        self.page.get_by_text(text).first.wait_for()

    def shown_picture(self, server: ComfyUIServer, before: str = "") -> Image.Image:
        """The picture on the Save Image node, once there is one other than `before`."""
        image = "app.graph._nodes.find(n => n.type == 'SaveImage').imgs?.[0]"
        seen = f"before => {image}?.naturalWidth && {image}.src != before"
        self.page.wait_for_function(seen, arg=before, timeout=1000 * RUN_SECONDS)
        query = dict(parse_qsl(urlsplit(self.page.evaluate(f"() => {image}.src")).query, keep_blank_values=True))
        shown = server.get("/view", **{key: query[key] for key in ("filename", "subfolder", "type")})
        return Image.open(io.BytesIO(shown))
