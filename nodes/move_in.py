"""The server's part of the menu's entry *Move in from other packs*: a workflow with nodes of ComfyUI-MultiGPU, raylight or
SGLang becomes one with ComfyUI's own nodes.

web/js/move_in.js sends the workflow file, opens the answer and then does what *Run on several GPUs* does. The request is
`POST /parallel_dit/move_in` with the file; the answer {"workflow": the new file, "moved": titles, "left": sentences}.

A node of ComfyUI-MultiGPU has the inputs of the node that it extends, and after them a device and sizes. raylight's nodes
have `ray_actors` where ComfyUI's have `model`; its loader takes LoRAs as an input (src/raylight/nodes.py). SGLang's loaders
have ComfyUI's inputs and then their own (apps/ComfyUI_SGLDiffusion/nodes.py). Its nodes of type SGLDiffusion... ask a server
for whole images, and stay.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .ui.routes import json_of

MOST_BYTES = 1 << 24
"""Maximum size of a workflow file in bytes."""
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
"""Types of inputs for which the editor shows widgets."""
CONTROL = "control_after_generate"
SUFFIX = re.compile(r"(DisTorch2?)?MultiGPU$")
RAYLIGHT = re.compile(
    r"Ray[A-Z]|XFuser|UnifiedParallelSampler|DP(KSampler|SamplerCustom|NoiseList|ConditioningList|LatentList)"
)
"""Prefixes of the types of raylight's nodes."""
ACTORS = "RAY_ACTORS"
STARTS = ("RayInitializer", "RayInitializerAdvanced", "RayKill")
"""raylight's nodes that start and end its processes."""
RAY_LOADERS = ("RayUNETLoader", "RayGGUFLoader")
PASSED = {
    "RayTorchCompileModel": "set `compile` on Parallel DiT Loader",
    "RayTeaCache": "use Parallel Step Cache",
    "RayCleanVRAMUsed": "ranks and ComfyUI make room for each other",
    "DeviceSelectorMultiGPU": "ComfyUI's loaders choose the device",
    "SGLDOptions": "set the number of GPUs and the mode on Parallelize Model",
}
"""Nodes that are removed, and the reason."""
GGUF, READS_GGUF = "UnetLoaderGGUF", "ParallelDiTLoader"
"""ComfyUI-GGUF's loader, and this pack's loader for a ComfyUI without it."""
FILE = re.compile(r"\.(safetensors|sft|gguf|ckpt|pth?|bin)$")
RENAMED = {
    "XFuserKSamplerAdvanced": "KSamplerAdvanced",
    "XFuserSamplerCustom": "SamplerCustom",
    "XFuserSamplerCustomAdvanced": "SamplerCustomAdvanced",
    "RayLoraLoader": "LoraLoaderModelOnly",
    "RayGGUFLoader": GGUF,
    "RayControlNetApply": "ControlNetApplyAdvanced",
    "UNetLoaderLP": "UNETLoader",
    "SGLDUNETLoader": "UNETLoader",
    "SGLDLoraLoader": "LoraLoaderModelOnly",
    "CheckpointLoaderAdvancedMultiGPU": "CheckpointLoaderSimple",
    "CheckpointLoaderAdvancedDisTorch2MultiGPU": "CheckpointLoaderSimple",
}
"""New names of types for which removing `Ray` or `MultiGPU` is not enough."""
INPUTS = {"ray_actors": "model", "ray_control_net": "control_net", "ray_vae": "vae"}
"""raylight's name of an input -> ComfyUI's name."""


@dataclass(frozen=True)
class Input:
    name: str
    kind: str
    options: tuple[Any, ...] = ()
    """The values of a combo box."""
    default: Any = None
    control: bool = False
    """Whether the editor adds the widget control_after_generate after it."""

    @property
    def widget(self) -> bool:
        return self.kind in WIDGETS


@dataclass(frozen=True)
class Stock:
    """A node of this ComfyUI: its inputs in the order of its definition, and (name, type) of its outputs."""

    inputs: tuple[Input, ...]
    outputs: tuple[tuple[str, str], ...]


Find = Callable[[str], Stock | None]
"""Returns the node of a type, or None if this ComfyUI does not have it."""


def move_in(body: bytes) -> dict[str, Any]:
    """Return the answer to a request with a workflow file. Raises ValueError for anything else."""
    try:
        return moved_in(json_of(body, "workflow", MOST_BYTES), of_this_comfyui)
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # of a file in another form
        raise ValueError(f"This is not a workflow file: {error}") from error


def of_this_comfyui(kind: str) -> Stock | None:
    """Return the node of this type in this ComfyUI; see Find."""
    from nodes import NODE_CLASS_MAPPINGS

    node: Any = NODE_CLASS_MAPPINGS.get(kind)
    if node is None:
        return None
    given = node.INPUT_TYPES()
    inputs = [input_of(name, *entry) for part in ("required", "optional") for name, entry in given.get(part, {}).items()]
    kinds = [str(each) for each in node.RETURN_TYPES]
    names = getattr(node, "RETURN_NAMES", None) or kinds
    return Stock(tuple(inputs), tuple(zip(names, kinds, strict=True)))


def input_of(name: str, kind: Any, about: Mapping[str, Any] | None = None) -> Input:
    about = about or {}
    options = tuple(kind) if isinstance(kind, list | tuple) else tuple(about.get("options", ()))
    kind = "COMBO" if isinstance(kind, list | tuple) else str(kind)
    if about.get("forceInput"):
        kind = f"{kind} wire"
    default = about.get("default", options[0] if options else None)
    return Input(name, kind, options, default, bool(about.get(CONTROL)))


def moved_in(workflow: Any, find: Find) -> dict[str, Any]:
    """{"workflow", "moved", "left"}, see above. Raises ValueError for anything but a workflow file."""
    if not isinstance(workflow, dict) or not isinstance(workflow.get("nodes"), list):
        raise ValueError("it has no nodes.")
    workflow = copy.deepcopy(workflow)
    moved, left = [], []
    for graph in (workflow, *workflow.get("definitions", {}).get("subgraphs", [])):
        moving = Moving(Graph(graph), find)
        moving.all()
        moved += moving.moved
        left += moving.left
    return {"workflow": workflow, "moved": moved, "left": left}


@dataclass
class Link:
    id: int
    origin: int
    slot: int
    target: int
    target_slot: int
    kind: str
    whole: Any = None
    """The link as the file has it. Newer editors add more fields, such as reroutes."""


FIELDS = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
"""Fields of a link that is an object, as in subgraphs. In the outermost graph a link is a list of these values."""


class Graph:
    """A workflow file's graph, or one of its subgraphs, while it is changed. `data` is changed in place by `store`."""

    def __init__(self, data: dict[str, Any]):
        self.data = data
        self.nodes: dict[int, dict[str, Any]] = {node["id"]: node for node in data["nodes"]}
        self.lists = all(isinstance(link, list) for link in data.get("links", []))
        values = [
            [*(link[:6] if isinstance(link, list) else (link[name] for name in FIELDS)), link]
            for link in data.get("links", [])
        ]
        self.links = {each[0]: Link(*each) for each in values}
        self._node = max([*self.nodes, 0])
        self._link = max([*self.links, 0])

    def into(self, node: dict[str, Any], name: str) -> Link | None:
        """Return the link that ends at this input, or None."""
        entry = next((each for each in node.get("inputs") or [] if each["name"] == name), None)
        return self.links.get(entry["link"]) if entry and entry.get("link") is not None else None

    def leaving(self, node: dict[str, Any], slot: int | None = None) -> list[Link]:
        return [link for link in self.links.values() if link.origin == node["id"] and slot in (None, link.slot)]

    def add(self, kind: str, near: dict[str, Any], values: list[Any], below: int) -> dict[str, Any]:
        self._node += 1
        x, y = list(near["pos"].values())[:2] if isinstance(near["pos"], dict) else near["pos"][:2]
        node = {"id": self._node, "type": kind, "pos": [x, y - 130 * below], "size": [270, 100], "mode": near.get("mode", 0)}
        node |= {"flags": {}, "order": near.get("order", 0), "properties": {}, "widgets_values": values}
        self.nodes[self._node] = node
        return node

    def connect(self, origin: tuple[int, int], node: dict[str, Any], name: str, kind: str) -> None:
        """Add a link from (node, slot) to an input, by name. `store` sets its slot."""
        self._link += 1
        self.links[self._link] = Link(self._link, *origin, node["id"], 0, kind)
        inputs = [each for each in node.get("inputs") or [] if each["name"] != name]
        node["inputs"] = [*inputs, {"name": name, "type": kind, "link": self._link}]

    def drop(self, link: Link) -> None:
        self.links.pop(link.id, None)
        for entry in self.nodes.get(link.target, {}).get("inputs") or []:
            if entry.get("link") == link.id:
                entry["link"] = None

    def remove(self, node: dict[str, Any]) -> None:
        for link in [each for each in self.links.values() if node["id"] in (each.origin, each.target)]:
            self.drop(link)
        del self.nodes[node["id"]]

    def bypass(self, node: dict[str, Any], name: str) -> None:
        """Remove the node. Links from its outputs then begin where the link to its input `name` began."""
        if (own := self.into(node, name)) is not None:
            for link in self.leaving(node):
                link.origin, link.slot, link.kind = own.origin, own.slot, own.kind
        self.remove(node)

    def store(self) -> None:
        """Write nodes and links back to `data`, with the present slots of links and the present links of outputs."""
        for node in self.nodes.values():
            for slot, entry in enumerate(node.get("inputs") or []):
                if (link := self.links.get(entry.get("link"))) is not None:
                    link.target_slot = slot
            for slot, entry in enumerate(node.get("outputs") or []):
                entry["links"] = [link.id for link in self.leaving(node, slot)]
        self.data["nodes"] = list(self.nodes.values())
        self.data["links"] = []
        for link in self.links.values():
            values = [link.id, link.origin, link.slot, link.target, link.target_slot, link.kind]
            as_object = {**(link.whole or {}), **dict(zip(FIELDS, values, strict=True))} if not self.lists else {}
            self.data["links"].append(as_object or [*values, *(link.whole or [])[6:]])
        for end in [*self.data.get("inputs", []), *self.data.get("outputs", [])]:  # of a subgraph
            end["linkIds"] = [each for each in end.get("linkIds") or [] if each in self.links]
        last = {"node": self._node, "link": self._link}
        for name, value in last.items():
            if f"last_{name}_id" in self.data:
                self.data[f"last_{name}_id"] = max(value, self.data[f"last_{name}_id"])
            if f"last{name.title()}Id" in self.data.get("state", {}):
                self.data["state"][f"last{name.title()}Id"] = max(value, self.data["state"][f"last{name.title()}Id"])


@dataclass
class Moving:
    """The changes to one graph."""

    graph: Graph
    find: Find
    moved: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def all(self) -> None:
        nodes = list(self.graph.nodes.values())
        if not any(self._theirs(node["type"]) for node in nodes):
            return
        self._models()
        for node in nodes:
            if node["type"] in RAY_LOADERS:
                self._loras(node)
        for node in nodes:
            if node["id"] in self.graph.nodes and self._theirs(node["type"]):
                self._one(node)
        self.graph.store()

    @staticmethod
    def _theirs(kind: str) -> bool:
        return kind.endswith("MultiGPU") or kind in {*RENAMED, *PASSED} or RAYLIGHT.match(kind) is not None

    def _stock(self, kind: str) -> str:
        return RENAMED.get(kind) or re.sub(r"^Ray", "", SUFFIX.sub("", kind))

    def _models(self) -> None:
        """Connect every link of raylight's processes to the node that outputs the model, because samplers only pass them
        on."""
        for link in [each for each in self.graph.links.values() if each.kind == ACTORS]:
            link.origin, link.slot = self._model(link)
            link.kind = "MODEL"

    def _model(self, link: Link) -> tuple[int, int]:
        """Return (node, slot) of the node that outputs the model for such a link. It is not a sampler."""
        node = self.graph.nodes.get(link.origin)
        if node is None or (node["type"].startswith("Ray") and not node["type"].startswith("RayVAE")):
            return link.origin, link.slot
        for name in ("ray_actors", "guider"):
            if (behind := self.graph.into(node, name)) is not None:
                if name == "guider":
                    behind = self.graph.into(self.graph.nodes[behind.origin], "ray_actors") or behind
                return self._model(behind)
        return link.origin, link.slot

    def _one(self, node: dict[str, Any]) -> None:
        kind, title = node["type"], node.get("title") or node["type"]
        if kind in STARTS:
            return self.graph.remove(node)
        if kind in PASSED:
            self.left.append(f"{title} was removed: {PASSED[kind]}.")
            return self.graph.bypass(node, "anything" if kind == "RayCleanVRAMUsed" else "ray_actors")
        if kind == "RayLoraLoader":
            return self.graph.remove(node)  # _loras has put one behind each loader that took it
        stock = "ParallelVAEDecode" if kind == "RayVAEDecodeDistributed" else self._stock(kind)
        stock = READS_GGUF if stock == GGUF and self.find(GGUF) is None else stock
        if (into := self.find(stock)) is None:
            self.left.append(f"{title} was left: this ComfyUI has no {stock}.")
            return None
        values = list(self._values(node, into))[: 1 if stock == READS_GGUF else None]
        if kind == "RayVAEDecodeDistributed":
            name = next((each for each in node.get("widgets_values") or [] if isinstance(each, str)), "")
            self._given(node, "VAELoader", "vae", [name], 1)
            values = []
        if kind == "XFuserSamplerCustomAdvanced":
            noisy, seed, control = (*(node.get("widgets_values") or []), True, 0, "fixed")[:3]
            self._given(node, *(("RandomNoise", "noise", [seed, control]) if noisy else ("DisableNoise", "noise", [])), 1)
        self._become(node, stock, into, values)
        self.moved.append(title)
        return None

    def _values(self, node: dict[str, Any], into: Stock) -> Iterator[Any]:
        """Yield the values of the new node's widgets. They are the first values of the old node, which come from the node
        that it extends. A value that a combo box does not have becomes its default. A missing file's name stays, because
        ComfyUI reports it."""
        given = iter(node.get("widgets_values") or [])
        if node["type"] in ("RayVAELoader", "RayControlNetLoader"):
            given = iter([each for each in given if isinstance(each, str)])
        for each in into.inputs:
            if not each.widget:
                continue
            value = next(given, each.default)
            known = not each.options or value in each.options or FILE.search(str(value))
            yield value if known else each.default
            if each.control:
                yield next(given, "fixed")

    def _loras(self, loader: dict[str, Any]) -> None:
        """Put LoRA loaders after raylight's loader, in place of those before it."""
        chain, link = [], self.graph.into(loader, "lora")
        while link is not None and (node := self.graph.nodes.get(link.origin)) is not None:
            chain.append(node)
            link = self.graph.into(node, "prev_ray_lora")
        before = loader
        for node in reversed(chain):
            new = self.graph.add("LoraLoaderModelOnly", node, list(node.get("widgets_values") or []), 0)
            new["outputs"] = [{"name": "MODEL", "type": "MODEL", "links": []}]
            for each in self.graph.leaving(before, 0):
                each.origin = new["id"]
            self.graph.connect((before["id"], 0), new, "model", "MODEL")
            self.moved.append(node.get("title") or node["type"])
            before = new

    def _given(self, node: dict[str, Any], kind: str, name: str, values: list[Any], below: int) -> None:
        """Add a node of this kind, and connect it to the input of this name."""
        new = self.graph.add(kind, node, values, below)
        stock = self.find(kind)
        assert stock is not None, kind  # ComfyUI's own
        (output,) = stock.outputs
        new["outputs"] = [{"name": output[0], "type": output[1], "links": []}]
        self.graph.connect((new["id"], 0), node, name, output[1])

    def _become(self, node: dict[str, Any], kind: str, into: Stock, values: list[Any]) -> None:
        """Give the node another type, with the inputs and outputs of that type. Links are kept by name."""
        own = {INPUTS.get(entry["name"], entry["name"]): entry for entry in node.get("inputs") or []}
        inputs = []
        for each in sorted(into.inputs, key=lambda each: each.widget):  # the editor has sockets of widgets last
            entry = {"name": each.name, "type": each.kind.removesuffix(" wire"), "link": own.pop(each.name, {}).get("link")}
            inputs.append(entry | ({"widget": {"name": each.name}} if each.widget else {}))
        for entry in own.values():
            if (link := self.graph.links.get(entry.get("link"))) is not None:
                self.graph.drop(link)
        kept = [{"name": name, "type": output, "links": []} for name, output in into.outputs]
        for link in self.graph.leaving(node):
            if link.slot >= len(kept):
                self.graph.drop(link)
            else:
                link.kind = into.outputs[link.slot][1]
        node |= {"type": kind, "inputs": inputs, "outputs": kept, "widgets_values": values}
        node.pop("title", None)
        node["properties"] = {"Node name for S&R": kind}
