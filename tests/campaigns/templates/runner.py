"""Runs templates in a booted ComfyUI, native and ours, and judges what came out."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from testing.comfyui.scripted import Inside

from .conversion import Template
from .files import case_of, what_it_is

LIMIT, TIMES = 5e-5, 10.0
"""Largest difference of a latent, of its largest value: this, or so many times what the native model differs from itself
when it attends by another of ComfyUI's kernels."""
NO_CLASS = "'comfy.supported_models' has no attribute"
LORAS = ("LoraLoaderModelOnly", "LoraLoader")
EQUAL, DIFFERS, REFUSED, FAILED, NOT_OURS, NOT_RUN = "equal", "differs", "refused", "failed", "not ours", "not run"


@dataclass(frozen=True)
class Verdict:
    """What became of a template. `reason`: of everything but EQUAL. `difference`, `itself`: see LIMIT."""

    name: str
    title: str
    uses: int
    files: tuple[str, ...]
    outcome: str
    reason: str = ""
    difference: float | None = None
    itself: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}


def run_all(templates: Iterable[Template], inside: Inside, base: Path) -> Iterator[Verdict]:
    """One after the other. The base directory gets the files that they name."""
    saved: set[str] = set()
    for template in templates:
        files = {file: case_of(file) for file in template.files()}
        if not files:
            yield Verdict(*about(template), NOT_RUN, f"this ComfyUI has no {', '.join(template.unknown)}")
            continue
        others = [f"{file}: {what_it_is(file)}" for file, case in files.items() if case is None]
        if others:
            yield Verdict(*about(template), NOT_OURS, "; ".join(others))
            continue
        try:
            save_files(files, base, inside, saved)
        except AssertionError as error:
            text = str(error).strip().splitlines()[-1]
            yield Verdict(*about(template), NOT_RUN if NO_CLASS in text else FAILED, text)
            continue
        yield compare(template, inside, files)


def about(template: Template) -> tuple[str, str, int, tuple[str, ...]]:
    """A verdict's first fields."""
    return template.name, template.title, template.uses, tuple(template.files())


def compare(template: Template, inside: Inside, files: dict[str, str]) -> Verdict:
    try:
        found, _ = inside.run("templates", prompt=template.prompt, files=files, loras=loras(template))
    except AssertionError as error:
        return Verdict(*about(template), FAILED, str(error)[-300:])
    verdict = judge(about(template), found)
    if verdict.outcome == NOT_RUN and template.unknown:
        return replace(verdict, reason=f"this ComfyUI has no {', '.join(template.unknown)}: {verdict.reason}")
    return verdict


def save_files(files: dict[str, str], base: Path, inside: Inside, saved: set[str]) -> None:
    """A template's diffusion models, by the cases that they are of. `saved`: the cases that the base directory has."""
    for file, name in files.items():
        if name not in saved:
            inside.run("small_files", names=[name])
        saved.add(name)
        link_model(base / "models", file, name)


def link_model(models: Path, file: str, case: str) -> None:
    """The case's file under a template's name, as a diffusion model and as an all-in-one file."""
    source = models / "diffusion_models" / f"{case}.safetensors"
    for folder in ("diffusion_models", "checkpoints"):
        path = models / folder / file
        if path == source:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_symlink():
            path.unlink(missing_ok=True)  # a placeholder
            path.symlink_to(source)


def loras(template: Template) -> dict[str, str]:
    """A LoRA's name -> the diffusion model that it is made for, the first of the template."""
    nodes = [node["inputs"]["lora_name"] for node in template.prompt.values() if node["class_type"] in LORAS]
    return {name: template.files()[0] for name in nodes if isinstance(name, str)}


def judge(about: tuple, found: dict[str, Any]) -> Verdict:
    """By what inside/templates.py found."""
    for kind in ("native", "native itself", "ours"):
        if "error" in (result := found.get(kind, {})):
            text = re.sub(r"/\S*/parallel-dit-[\w-]+/", "", result["error"].strip().splitlines()[-1])  # the run's own folder
            refused = kind == "ours" and ": ValueError " in text
            return Verdict(*about, REFUSED if refused else FAILED if kind == "ours" else NOT_RUN, text)
    itself, ours = max(found["native itself"]), max(found["ours"])
    equal = math.isfinite(ours) and ours <= max(LIMIT, TIMES * itself)
    return Verdict(*about, EQUAL if equal else DIFFERS, "", ours, itself)
