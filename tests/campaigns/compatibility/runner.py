"""Runs nodes natively and on ranks in a booted ComfyUI, and judges what came out."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scripts.comfyui_server import ComfyUIServer
from testing.comfyui.scripted import ComfyUI, Inside
from tests.campaigns.templates.runner import DIFFERS, EQUAL, FAILED, NOT_RUN, REFUSED, Verdict, judge
from tests.comfyui.conftest import SCRIPTS

from .graphs import LATENTS, LORA, Missing, kind_of, prompt
from .settings import SETTINGS

MODES = ("ulysses", "split batch", "bands")
ORDER = (NOT_RUN, EQUAL, REFUSED, DIFFERS, FAILED)
"""From best to worst: a node is what it is in its worst mode and model."""
AT_ONCE = 20
"""Nodes of a process. Those of one that ends early are run again one by one."""


def settings_of(node: str, model: str) -> dict[str, Any]:
    """Those of the table for every model, with those for this one."""
    entry = SETTINGS.get(node, {})
    own = entry.get(model.split("-")[0], {})
    merged = {key: entry.get(key, {}) | own.get(key, {}) for key in ("inputs", "settings")}
    return entry | merged


def run_all(comfyui: ComfyUI, base: Path, packs: tuple[Path, ...] = (), names: Iterable[str] = ()) -> Iterator[Verdict]:
    """Every node, or those of these names, with each model. `base`: an empty base directory. `packs`: further ones."""
    for folder in ("models/diffusion_models", "models/checkpoints", "models/loras", "input", "output"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    with contextlib.closing(Inside(comfyui, base, SCRIPTS)) as inside:
        inside.run("small_files", names=[*LATENTS])
        (base / "models" / "loras" / LORA).touch()
        with ComfyUIServer(comfyui.checkout, base, comfyui.python, packs=packs) as server:
            info = json.loads(server.get("/object_info"))
        pack = {name: node["python_module"] for name, node in info.items()}
        ours = pack["ParallelDiTLoader"]
        chosen = [name for name in names or info if pack[name] != ours and kind_of(info[name])]
        for model in LATENTS:
            yield from of_model(inside, info, model, chosen)


def of_model(inside: Inside, info: dict[str, Any], model: str, names: list[str]) -> Iterator[Verdict]:
    prompts = {}
    for name in names:
        about = name, info[name]["display_name"], 0, (model,)
        try:
            prompts[name] = prompt(info, model, name, settings_of(name, model))
        except Missing as missing:
            yield Verdict(*about, NOT_RUN, f"nothing here stands in for {missing}")
    left = [*prompts]
    groups = [left[start : start + AT_ONCE] for start in range(0, len(left), AT_ONCE)]
    while groups:
        group = groups.pop(0)
        try:
            found = some(inside, model, {name: prompts[name] for name in group})
        except AssertionError as error:
            if len(group) > 1:
                groups += [[name] for name in group]
                continue
            found = {group[0]: {"ours": {mode: {"error": str(error)[-300:]} for mode in MODES}, "itself": 0.0}}
        for name in group:
            yield worst((name, info[name]["display_name"], 0, (model,)), found[name])


def some(inside: Inside, model: str, prompts: dict[str, Any]) -> dict[str, Any]:
    """What inside/compatibility.py found. AssertionError if its process ended."""
    file = f"{model}.safetensors"
    packs = {"prompts": prompts, "files": {file: model}, "loras": {LORA: file}, "modes": list(MODES)}
    return inside.run("compatibility", **packs)[0]


def worst(about: tuple, found: dict[str, Any]) -> Verdict:
    """Of all modes."""
    if "error" in found:
        return judge(about, {"native": found})
    verdicts = [
        judge(about, {"native itself": [found["itself"]], "ours": each if isinstance(each, dict) else [each]})
        for each in found["ours"].values()
    ]
    return max(verdicts, key=lambda verdict: ORDER.index(verdict.outcome))


def counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Outcome -> nodes, each counted once, by its worst model."""
    found: dict[str, str] = {}
    for verdict in verdicts:
        found[verdict.name] = max(verdict.outcome, found.get(verdict.name, NOT_RUN), key=ORDER.index)
    return dict(Counter(found.values()))
