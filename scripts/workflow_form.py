"""A ComfyUI graph as data: nodes in titled groups, groups in columns, and the two forms that ComfyUI reads it in."""

import uuid
from dataclasses import dataclass, field
from typing import Any

from scripts.graphs.chinese import NOTES, titled
from scripts.graphs.published import PUBLISHED

TITLE, BADGE, GROUP_TITLE = 30, 26, 38
"""Heights in pixels: a node's title bar, the pack's name above it, a group's title."""
LETTERS = 20
"""Size of a group's title where there is room for it."""
MARGIN, GAP = 20, 24
"""Between a group's edge and its nodes; between nodes or groups."""
TALLER, LINES = 90, 70
"""By which a node grows in Nodes 2.0, at most, and when it says something."""
NARROWEST = 226
"""A node's width in Nodes 2.0, at least."""
SCREEN, TOOLBARS = (1510, 780), (70, 105)
"""What a browser window of 1600 x 900 leaves for the graph, and what is left of it and above it."""
SEEDS = ("seed", "noise_seed")
"""Widgets behind which the editor adds control_after_generate."""
CONTROL = "fixed"
NOTE = "MarkdownNote"
ANY_TYPE = {("PreviewAny", "source")}


@dataclass(frozen=True)
class Link:
    """An input that comes from output `slot` of another node."""

    node: "Node"
    slot: int


@dataclass(frozen=True)
class Unconnected:
    """An optional input that is left open."""

    type: str


@dataclass(frozen=True, eq=False)
class Node:
    """`inputs`: in the node's own order, a Link, an Unconnected, or a widget's value. `outputs`: (name, type).

    `size`: width and height below the title bar. Notes have no outputs and no API form.
    """

    type: str
    size: tuple[int, int]
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[tuple[str, str], ...] = ()
    title: str | None = None

    def __getitem__(self, output: str) -> Link:
        return Link(self, [name for name, _ in self.outputs].index(output))


@dataclass(frozen=True, eq=False)
class Group:
    """Columns of nodes side by side, in a box with a title or, without one, on the canvas."""

    title: str | None
    columns: tuple[tuple[Node, ...], ...]

    @property
    def margin(self) -> int:
        return MARGIN if self.title else 0


Column = tuple[Group, ...]


@dataclass(frozen=True, eq=False)
class Graph:
    """Groups in columns, from left to right. A node's id is its place in `nodes`, from 1.

    `first`: nodes with the first ids, wherever they are.
    """

    columns: tuple[Column, ...]
    first: tuple[Node, ...] = ()

    @property
    def nodes(self) -> list[Node]:
        """`first`, then the others as they are placed, notes last."""
        placed = [node for column in self.columns for group in column for nodes in group.columns for node in nodes]
        others = [node for node in placed if node not in self.first]
        return [*self.first, *sorted(others, key=lambda node: node.type == NOTE)]

    def id(self, node: Node) -> int:
        return self.nodes.index(node) + 1


def place(graph: Graph) -> tuple[dict[Node, tuple[int, int]], list[dict[str, Any]]]:
    """Where every node's upper left corner below its title bar is, and the groups' boxes."""
    positions, boxes, x = {}, [], 0
    for column in graph.columns:
        y, column_width = 0, 0
        for group in column:
            left, bottom, first = x + group.margin, y, y + (GROUP_TITLE if group.title else 0)
            for nodes in group.columns:
                below = first
                for node in nodes:
                    below += TITLE + (BADGE if node.type != NOTE else 0)
                    positions[node] = (left, below)
                    below += node.size[1] + room(node) + GAP
                left += max(NARROWEST, *(node.size[0] for node in nodes)) + GAP
                bottom = max(bottom, below - GAP + group.margin)
            width = left - GAP + group.margin - x
            if group.title:
                boxes.append({"title": titled(group.title), "bounding": [x, y, width, bottom - y]})
            column_width, y = max(column_width, width), bottom + GAP
        x += column_width + GAP
    return positions, boxes


def room(node: Node) -> int:
    """What is left below a node, since it grows."""
    if node.type == NOTE:
        return 0
    speaks = any(word in node.type for word in ("Parallel", "PipeFusion", "KSampler", "SamplerCustom"))
    return TALLER + LINES if speaks else TALLER // 2


def ui_form(name: str, graph: Graph) -> dict[str, Any]:
    """The graph as ComfyUI's editor stores it (litegraph 0.4)."""
    links: list[list[Any]] = []
    positions, boxes = place(graph)
    placed = [_ui_node(node, positions[node], graph, links) for node in graph.nodes]
    for node in (node for node in placed if node["type"] == NOTE):
        node["widgets_values"] = [f"{text}\n{NOTES[name]}\n" for text in node["widgets_values"]]
    for link_id, source, slot, *_ in links:
        placed[source - 1]["outputs"][slot]["links"].append(link_id)
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"parallel-dit/workflows/{name}")),
        "revision": 0,
        "last_node_id": len(placed),
        "last_link_id": len(links),
        "nodes": placed,
        "links": links,
        "groups": [
            {"id": index, **box, "color": "#3f789e", "font_size": _letters(box), "flags": {}}
            for index, box in enumerate(boxes, 1)
        ],
        "config": {},
        "extra": {"ds": _view(positions)},
        "version": 0.4,
    }


def _letters(box: dict[str, Any]) -> int:
    """Size in pixels of a group's title, so that it ends before the group does: Chinese letters are about twice as wide."""
    wide = sum(1.0 if letter > "\u2e80" else 0.52 for letter in box["title"])
    return min(LETTERS, int((box["bounding"][2] - 2 * MARGIN) / wide))


def _view(positions: dict[Node, tuple[int, int]]) -> dict[str, Any]:
    """Scale and offset that show the whole graph on SCREEN, below its toolbars."""
    right = max(x + node.size[0] for node, (x, _) in positions.items()) + MARGIN
    bottom = max(y + node.size[1] + room(node) for node, (_, y) in positions.items()) + MARGIN
    scale = round(min(1.0, SCREEN[0] / right, SCREEN[1] / bottom), 2)
    return {"scale": scale, "offset": [round(edge / scale) for edge in TOOLBARS]}


def _ui_node(node: Node, position: tuple[int, int], graph: Graph, links: list[list[Any]]) -> dict[str, Any]:
    node_id, sockets, widgets = graph.id(node), [], []
    for name, value in node.inputs.items():
        if isinstance(value, Link):
            kind = value.node.outputs[value.slot][1]
            links.append([len(links) + 1, graph.id(value.node), value.slot, node_id, len(sockets), kind])
            sockets.append({"name": name, "type": "*" if (node.type, name) in ANY_TYPE else kind, "link": len(links)})
        elif isinstance(value, Unconnected):
            sockets.append({"name": name, "type": value.type, "shape": 7, "link": None})
        else:
            widgets += [value, CONTROL] if name in SEEDS else [value]
    entry = {
        "id": node_id,
        "type": node.type,
        "pos": list(position),
        "size": list(node.size),
        "flags": {},
        "order": node_id - 1,
        "mode": 0,
        "inputs": sockets,
        "outputs": [{"name": name, "type": kind, "links": []} for name, kind in node.outputs],
        "properties": {"Node name for S&R": node.type},
        "widgets_values": widgets,
    }
    if models := [PUBLISHED[value] for value in node.inputs.values() if isinstance(value, str) and value in PUBLISHED]:
        entry["properties"]["models"] = models
    if node.title:
        entry["title"] = titled(node.title)
    return entry


def api_form(graph: Graph) -> dict[str, Any]:
    """The graph as POST /prompt takes it."""
    prompt = {}
    for node in graph.nodes:
        if node.type == NOTE:
            continue
        inputs = {
            name: [str(graph.id(value.node)), value.slot] if isinstance(value, Link) else value
            for name, value in node.inputs.items()
            if not isinstance(value, Unconnected)
        }
        prompt[str(graph.id(node))] = {"class_type": node.type, "inputs": inputs}
    return prompt
