"""Writes workflows/*.json (what ComfyUI opens) and workflows/api/*.json (what its HTTP interface takes). No arguments.

Each graph is described once, below. tests/comfyui/test_workflows.py compares both forms with a running ComfyUI, and the
committed files with what this script writes.
"""

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKFLOWS = Path(__file__).resolve().parent.parent / "workflows"


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

    Notes have no outputs and no API form.
    """

    type: str
    position: tuple[int, int]
    size: tuple[int, int]
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[tuple[str, str], ...] = ()
    title: str | None = None

    def __getitem__(self, output: str) -> Link:
        return Link(self, [name for name, _ in self.outputs].index(output))


def ui_form(name: str, nodes: list[Node]) -> dict[str, Any]:
    """The graph as ComfyUI's editor stores it (litegraph 0.4)."""
    links: list[list[Any]] = []
    placed = [_ui_node(node, nodes, links) for node in nodes]
    for link_id, source, slot, *_ in links:
        placed[source - 1]["outputs"][slot]["links"].append(link_id)
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"parallel-dit/workflows/{name}")),
        "revision": 0,
        "last_node_id": len(nodes),
        "last_link_id": len(links),
        "nodes": placed,
        "links": links,
        "groups": [],
        "config": {},
        "extra": {"ds": {"scale": 0.8, "offset": [40, 80]}},
        "version": 0.4,
    }


def _ui_node(node: Node, nodes: list[Node], links: list[list[Any]]) -> dict[str, Any]:
    node_id, sockets, widgets = nodes.index(node) + 1, [], []
    for name, value in node.inputs.items():
        if isinstance(value, Link):
            kind = value.node.outputs[value.slot][1]
            links.append([len(links) + 1, nodes.index(value.node) + 1, value.slot, node_id, len(sockets), kind])
            # PreviewAny's input takes any type.
            sockets.append({"name": name, "type": "*" if name == "source" else kind, "link": len(links)})
        elif isinstance(value, Unconnected):
            sockets.append({"name": name, "type": value.type, "shape": 7, "link": None})
        else:
            widgets.append(value)
            if name == "seed":  # the editor adds its control_after_generate widget behind every seed
                widgets.append("fixed")
    entry = {
        "id": node_id,
        "type": node.type,
        "pos": list(node.position),
        "size": list(node.size),
        "flags": {},
        "order": node_id - 1,
        "mode": 0,
        "inputs": sockets,
        "outputs": [{"name": name, "type": kind, "links": []} for name, kind in node.outputs],
        "properties": {"Node name for S&R": node.type},
        "widgets_values": widgets,
    }
    if node.title:
        entry["title"] = node.title
    return entry


def api_form(nodes: list[Node]) -> dict[str, Any]:
    """The graph as POST /prompt takes it."""
    prompt = {}
    for index, node in enumerate(nodes, 1):
        if node.type == "MarkdownNote":
            continue
        inputs = {
            name: [str(nodes.index(value.node) + 1), value.slot] if isinstance(value, Link) else value
            for name, value in node.inputs.items()
            if not isinstance(value, Unconnected)
        }
        prompt[str(index)] = {"class_type": node.type, "inputs": inputs}
    return prompt


def _note(position: tuple[int, int], size: tuple[int, int], text: str) -> Node:
    return Node("MarkdownNote", position, size, {"text": text}, title="What to turn")


def _loader() -> Node:
    return Node(
        "ParallelDiTLoader",
        (0, 0),
        (320, 190),
        {
            "model_name": "quickstart-digits (bundled)",
            "weight_dtype": "default",
            "pipefusion_degree": 2,
            "tensor_parallel_degree": 1,
            "split_batch_degree": 1,
            "devices": "cpu,cpu",
            "parallel_config": Unconnected("PARALLEL_CONFIG"),
        },
        (("MODEL", "MODEL"),),
    )


def _prompt(text: str, y: int, title: str) -> Node:
    return Node("QuickstartPrompt", (0, y), (320, 70), {"text": text}, (("CONDITIONING", "CONDITIONING"),), title)


def _latent() -> Node:
    sizes = {"width": 256, "height": 256, "batch_size": 1}
    return Node("EmptySD3LatentImage", (0, 540), (320, 110), sizes, (("LATENT", "LATENT"),))


def _sampler_widgets(model: Link, positive: Node, negative: Node, latent: Node) -> dict[str, Any]:
    return {
        "model": model,
        "seed": 42,
        "steps": 20,
        "cfg": 3.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "positive": positive["CONDITIONING"],
        "negative": negative["CONDITIONING"],
        "latent_image": latent["LATENT"],
        "denoise": 1.0,
    }


PIPEFUSION = {"num_pipeline_patch": 0, "warmup_steps": 1, "overlap": True, "extrapolate": True}

DEVICES_NOTE = """\
Runs on any machine, with no file to download: the bundled model is tiny, so `devices` is `cpu,cpu`, two processes on \
the CPU that hold half of the model each.

- **Your own GPUs**: set `devices` to `auto` and `pipefusion_degree` to the number of GPUs. The product of all degrees \
is the number of devices.
- **Your own model**: pick it in `model_name`, and replace the Quickstart nodes by the model's CLIP, VAE and empty \
latent.
- **Prompt**: up to four digits, `_` for an empty cell.
"""


def quickstart() -> list[Node]:
    """Bundled model, PipeFusion Sampler, and its report as text."""
    loader, latent = _loader(), _latent()
    positive = _prompt("3 1 4 1", 260, "Quickstart Prompt (positive)")
    negative = _prompt("", 400, "Quickstart Prompt (negative)")
    sampler = Node(
        "PipeFusionSampler",
        (400, 0),
        (320, 365),
        _sampler_widgets(loader["MODEL"], positive, negative, latent) | PIPEFUSION,
        (("LATENT", "LATENT"), ("report", "STRING")),
    )
    decode = Node("QuickstartDecode", (800, 0), (300, 40), {"samples": sampler["LATENT"]}, (("IMAGE", "IMAGE"),))
    save = Node("SaveImage", (1180, 0), (300, 365), {"images": decode["IMAGE"], "filename_prefix": "parallel-dit"}, ())
    report = Node("PreviewAny", (800, 430), (680, 220), {"source": sampler["report"]}, (), "What the ranks did")
    text = DEVICES_NOTE + (
        "- **`warmup_steps`**: as many as `steps` makes every step exact, to compare the pictures.\n"
        "- **`num_pipeline_patch`**: bands that the latent is cut into; 0 chooses.\n"
    )
    return [loader, positive, negative, latent, sampler, decode, save, report, _note((400, 430), (320, 220), text)]


def native_ksampler() -> list[Node]:
    """The same through Apply PipeFusion and ComfyUI's own KSampler."""
    loader, latent = _loader(), _latent()
    positive = _prompt("3 1 4 1", 260, "Quickstart Prompt (positive)")
    negative = _prompt("", 400, "Quickstart Prompt (negative)")
    apply = Node("ApplyPipeFusion", (400, 0), (300, 135), {"model": loader["MODEL"]} | PIPEFUSION, (("MODEL", "MODEL"),))
    sampler = Node(
        "KSampler",
        (780, 0),
        (320, 270),
        _sampler_widgets(apply["MODEL"], positive, negative, latent),
        (("LATENT", "LATENT"),),
    )
    decode = Node("QuickstartDecode", (1180, 0), (240, 40), {"samples": sampler["LATENT"]}, (("IMAGE", "IMAGE"),))
    save = Node("SaveImage", (1500, 0), (300, 340), {"images": decode["IMAGE"], "filename_prefix": "parallel-dit"}, ())
    text = DEVICES_NOTE + (
        "- **Apply PipeFusion** may be followed by any sampler, guider or scheduler of ComfyUI; bypassed, every step is "
        "exact.\n"
    )
    return [loader, positive, negative, latent, apply, sampler, decode, save, _note((780, 430), (640, 220), text)]


GRAPHS: dict[str, Callable[[], list[Node]]] = {"quickstart": quickstart, "native_ksampler": native_ksampler}


def files() -> dict[str, str]:
    """Path below workflows/ -> content."""
    out = {}
    for name, graph in GRAPHS.items():
        nodes = graph()
        for path, form in ((f"{name}.json", ui_form(name, nodes)), (f"api/{name}.json", api_form(nodes))):
            out[path] = json.dumps(form, indent=2) + "\n"
    return out


if __name__ == "__main__":
    for path, content in files().items():
        (WORKFLOWS / path).parent.mkdir(parents=True, exist_ok=True)
        (WORKFLOWS / path).write_text(content)
