"""Workflow files in which a MODEL goes from its loader to where it is used by all ways that the editor has."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

OUTSIDE_IN, INSIDE_OUT = -10, -20
"""The ids of a subgraph's inputs and outputs, as ends of links."""
CHECKPOINT = "all-in-one.safetensors"
"""A file that is not there."""
VALUES = {
    "UNETLoader": ["flux1-dev.safetensors", "default"],
    "CheckpointLoaderSimple": [CHECKPOINT],
    "KSampler": [1, "fixed", 2, 1.0, "euler", "simple", 1.0],
}
OUTPUTS = {"CheckpointLoaderSimple": ["MODEL", "CLIP", "VAE"], "KSampler": ["LATENT"]}
BYPASSED = 4


@dataclass
class Graph:
    """The outermost graph, or a subgraph's definition. `links`: as a subgraph's file has them."""

    ids: Any
    name: str = ""
    nodes: list[dict[str, Any]] = field(default_factory=list)
    links: list[dict[str, Any]] = field(default_factory=list)
    reroutes: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, inputs: tuple[str, ...] = (), outputs: list[str] | None = None, **more: Any) -> int:
        """A node. Inputs are of the type MODEL, outputs of those given, or of the kind's own, or one MODEL."""
        outputs = OUTPUTS.get(kind, ["MODEL"]) if outputs is None else outputs
        number = len(self.nodes) + 1
        made = {
            "id": number,
            "type": kind,
            "pos": [340 * number, 60 * number],
            "size": [300, 120],
            "flags": {},
            "order": number,
            "mode": 0,
            "inputs": [{"name": name, "type": "MODEL", "link": None} for name in inputs],
            "outputs": [{"name": kind, "type": kind, "links": []} for kind in outputs],
            "properties": {},
            "widgets_values": VALUES.get(kind, []),
        }
        self.nodes.append(made | more)
        return number

    def wire(self, origin: int, target: int, *, target_slot: int = 0, reroutes: tuple[int, ...] = ()) -> None:
        """A MODEL's link, by the reroutes with these ids, in order."""
        link = {
            "id": next(self.ids),
            "origin_id": origin,
            "origin_slot": 0,
            "target_id": target,
            "target_slot": target_slot,
            "type": "MODEL",
        }
        for place, number in enumerate(reroutes):
            known = next((each for each in self.reroutes if each["id"] == number), None)
            if known is None:
                known = {"id": number, "pos": [300 + 40 * number, 500], "linkIds": []}
                if place:
                    known["parentId"] = reroutes[place - 1]
                self.reroutes.append(known)
            known["linkIds"].append(link["id"])
            link["parentId"] = number
        self.links.append(link)
        if origin > 0:
            self.nodes[origin - 1]["outputs"][0]["links"].append(link["id"])
        if target > 0:
            self.nodes[target - 1]["inputs"][target_slot]["link"] = link["id"]

    def ends(self, prefix: str, own: str, slot: str) -> list[dict[str, Any]]:
        """A subgraph's inputs or outputs, by the links that begin or end there."""
        found: dict[int, list[int]] = {}
        for link in self.links:
            if link[own] in (OUTSIDE_IN, INSIDE_OUT):
                found.setdefault(link[slot], []).append(link["id"])
        return [
            {"id": f"{prefix}{place}", "name": f"model_{place}", "type": "MODEL", "linkIds": ids}
            for place, ids in sorted(found.items())
        ]


class Workflow:
    """A workflow file in the making: `root` and its subgraphs."""

    def __init__(self):
        self.ids = count(1)
        self.root = Graph(self.ids)
        self.subgraphs: dict[str, Graph] = {}

    def subgraph(self, name: str) -> tuple[str, Graph]:
        """A subgraph's definition, and the type of the nodes that are uses of it."""
        kind = f"{len(self.subgraphs) + 1:08d}-0000-4000-8000-000000000000"
        self.subgraphs[kind] = Graph(self.ids, name)
        return kind, self.subgraphs[kind]

    def file(self) -> dict[str, Any]:
        last = next(self.ids)
        arrays = [
            [link[key] for key in ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")]
            for link in self.root.links
        ]
        parents = [{"id": link["id"], "parentId": link["parentId"]} for link in self.root.links if "parentId" in link]
        return {
            "id": "00000000-0000-4000-8000-000000000000",
            "revision": 0,
            "last_node_id": len(self.root.nodes),
            "last_link_id": last,
            "nodes": self.root.nodes,
            "links": arrays,
            "groups": [],
            "config": {},
            "extra": {"reroutes": self.root.reroutes, "linkExtensions": parents},
            "definitions": {"subgraphs": [self._definition(kind, graph, last) for kind, graph in self.subgraphs.items()]},
            "version": 0.4,
        }

    def _definition(self, kind: str, graph: Graph, last: int) -> dict[str, Any]:
        return {
            "id": kind,
            "version": 1,
            "state": {"lastGroupId": 0, "lastNodeId": len(graph.nodes), "lastLinkId": last, "lastRerouteId": 9},
            "revision": 0,
            "config": {},
            "name": graph.name,
            "inputNode": {"id": OUTSIDE_IN, "bounding": [0, 0, 120, 60]},
            "outputNode": {"id": INSIDE_OUT, "bounding": [1500, 0, 120, 60]},
            "inputs": graph.ends("a", "origin_id", "origin_slot"),
            "outputs": graph.ends("b", "target_id", "target_slot"),
            "widgets": [],
            "nodes": graph.nodes,
            "groups": [],
            "links": graph.links,
            "reroutes": graph.reroutes,
            "extra": {},
        }


def _used(graph: Graph, origin: int, **how: Any) -> int:
    node = graph.add("KSampler", ("model",))
    graph.wire(origin, node, **how)
    return node


def several_uses(made: Workflow) -> None:
    """Two loaders, one of an all-in-one file; one is used three times, once by a bypassed node."""
    one, other = made.root.add("UNETLoader"), made.root.add("CheckpointLoaderSimple")
    for _ in range(2):
        _used(made.root, one)
    skipped = made.root.add("LoraLoaderModelOnly", ("model",), mode=BYPASSED)
    made.root.wire(one, skipped)
    _used(made.root, skipped)
    _used(made.root, other)


def reroutes(made: Workflow) -> None:
    """Two wires that part behind a reroute, and the old Reroute node, which is in no prompt."""
    loader = made.root.add("UNETLoader")
    _used(made.root, loader, reroutes=(1, 2))
    _used(made.root, loader, reroutes=(1, 3))
    old = made.root.add("Reroute", ("",))
    made.root.wire(loader, old)
    _used(made.root, old)


def out_of_a_subgraph(made: Workflow) -> None:
    """The loader is inside a subgraph that is used twice. Its MODEL is used inside and goes out."""
    kind, inside = made.subgraph("Loads")
    loader = inside.add("UNETLoader")
    _used(inside, loader)
    inside.wire(loader, INSIDE_OUT, reroutes=(1,))
    for _ in range(2):
        use = made.root.add(kind)
        _used(made.root, use)
        _used(made.root, use)


def into_a_subgraph(made: Workflow, ours_inside: bool = False) -> None:
    """The loader is outside. Its MODEL goes into a subgraph, to two nodes there and out again by one of them.
    `ours_inside`: Parallelize Model is the first of all."""
    kind, inside = made.subgraph("Samples")
    origin = OUTSIDE_IN
    if ours_inside:
        origin = inside.add("ParallelizeModel", ("model",))
        inside.wire(OUTSIDE_IN, origin)
    _used(inside, origin)
    lora = inside.add("LoraLoaderModelOnly", ("model",))
    inside.wire(origin, lora)
    inside.wire(lora, INSIDE_OUT)
    loader, use = made.root.add("UNETLoader"), made.root.add(kind, ("model_0",))
    made.root.wire(loader, use)
    _used(made.root, use)
    _used(made.root, loader)


def by_a_switch(made: Workflow) -> None:
    """By a node whose types follow what it is connected to."""
    loaders = [made.root.add("UNETLoader") for _ in range(2)]
    switch = made.root.add("ComfySwitchNode", ("on_false", "on_true"), widgets_values=[False])
    for slot, loader in enumerate(loaders):
        made.root.wire(loader, switch, target_slot=slot)
    _used(made.root, switch)


SHAPES: dict[str, Callable[..., None]] = {
    shape.__name__: shape for shape in (several_uses, reroutes, out_of_a_subgraph, into_a_subgraph, by_a_switch)
}


def workflow(name: str, **how: Any) -> dict[str, Any]:
    made = Workflow()
    SHAPES[name](made, **how)
    return made.file()
