"""Templates of the installed package, or workflows of other packs after *Move in*, -> prompts in API form, made by ComfyUI's
own editor in a browser."""

import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.comfyui_server import ComfyUIServer
from tests.support import chromium

from .files import is_helper

READY = "() => window.app?.canvas && window.LiteGraph?.registered_node_types.KSampler && app.graph._nodes.length"
CONVERT = """async graph => {
    await app.loadGraphData(graph, true, false)
    const known = LiteGraph.registered_node_types, made = (await app.graphToPrompt()).output
    const all = [graph, ...(graph.definitions?.subgraphs ?? [])], own = new Set(all.map(each => each.id))
    const types = all.flatMap(each => each.nodes).filter(node => ![2, 4].includes(node.mode)).map(node => node.type)
    return {prompt: made, unknown: [...new Set(types)].filter(type => !(type in known) && !own.has(type)).sort()}
}"""
LOADERS = ("UNETLoader", "CheckpointLoaderSimple", "ImageOnlyCheckpointLoader")
"""Nodes whose diffusion model runs on this machine, not at a provider of models."""
PASSING = ("easy cleanGpuUsed",)
"""Nodes of other packs that give what they take, which other packs' workflows use. ComfyUI's editor bypasses them."""
BYPASSED = 4
"""A node's mode."""
MILLISECONDS = 120_000


@dataclass(frozen=True)
class Template:
    """`uses`: how often it was opened, by the package's own count. `prompt`: in API form, without nodes that this ComfyUI
    does not have. `unknown`: what types these are of."""

    name: str
    title: str
    uses: int
    prompt: dict[str, Any]
    unknown: tuple[str, ...] = ()

    def files(self) -> list[str]:
        """Names of the diffusion models, without those that only prepare something for another one."""
        nodes = (node["inputs"] for node in self.prompt.values() if node["class_type"] in LOADERS)
        names = dict.fromkeys(str(inputs.get("unet_name") or inputs.get("ckpt_name")) for inputs in nodes)
        return [name for name in names if not is_helper(name)]


def templates_folder(python: Path) -> Path:
    """Where the template package of this Python's environment has its graphs."""
    pattern = "lib/python3*/site-packages/comfyui_workflow_templates_json/templates"
    return next(python.parent.parent.glob(pattern))


@contextmanager
def open_editor(server: ComfyUIServer) -> Iterator[Any]:
    """ComfyUI's page, in a browser. RuntimeError without one."""
    from playwright import sync_api

    if (path := chromium.find()) is None:
        raise RuntimeError(f"no Chromium: none of {', '.join(chromium.NAMES)} is on the path")
    server.post("/settings", chromium.SETTINGS)
    with sync_api.sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"]).new_page()
        page.set_default_timeout(MILLISECONDS)
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.wait_for_function(READY)
        yield page


def convert(checkout: Path, python: Path, base: Path, names: Collection[str] = ()) -> list[Template]:
    """Every template with a local diffusion model, or those of these names, the most used first. RuntimeError without a
    browser. LookupError for a name that no such template has."""
    folder, found = templates_folder(python), []
    known = {
        entry["name"]: entry for group in json.loads((folder / "index.json").read_text()) for entry in group["templates"]
    }
    with ComfyUIServer(checkout, base, python) as server, open_editor(server) as page:
        for name, entry in known.items():
            graph = folder / f"{name}.json"
            if (
                name in (names or known)
                and graph.exists()
                and any(loader in (text := graph.read_text()) for loader in LOADERS)
            ):
                template = _template(page, json.loads(text), name, entry["title"], entry.get("usage") or 0)
                if template.files():
                    found.append(template)
    if unknown := set(names) - {template.name for template in found}:
        raise LookupError(f"no such template: {', '.join(sorted(unknown))}")
    return sorted(found, key=lambda template: (-template.uses, template.name))


def move_in(checkout: Path, python: Path, base: Path, files: Iterable[Path]) -> list[tuple[Template, list[str]]]:
    """Workflow files of other packs after *Move in*, each with the sentences on what it left. RuntimeError without a
    browser."""
    found = []
    with ComfyUIServer(checkout, base, python) as server, open_editor(server) as page:
        for file in files:
            answer = json.loads(server.post("/parallel_dit/move_in", json.loads(file.read_text("utf-8"))))
            for node in answer["workflow"]["nodes"]:
                if node["type"] in PASSING:
                    node["mode"] = BYPASSED
            template = _template(page, answer["workflow"], file.stem, file.stem, 0)
            found.append((replace(template, prompt=_without_gguf(template.prompt)), answer["left"]))
    return found


def _without_gguf(prompt: dict[str, Any]) -> dict[str, Any]:
    """ComfyUI's loader in the place of ours, which reads GGUF: the small files are none, and ComfyUI alone reads none."""
    made = dict(prompt)
    for number, node in prompt.items():
        if node["class_type"] == "ParallelDiTLoader":
            inputs = {"unet_name": node["inputs"]["model_name"].replace(".gguf", ".safetensors"), "weight_dtype": "default"}
            made[number] = {"class_type": "UNETLoader", "inputs": inputs}
    return made


def _template(page: Any, graph: dict[str, Any], name: str, title: str, uses: int) -> Template:
    made = page.evaluate(CONVERT, graph)
    prompt = {number: node for number, node in made["prompt"].items() if node["class_type"]}
    return Template(name, title, uses, prompt, tuple(made["unknown"]))
