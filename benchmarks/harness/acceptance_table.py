"""The tables of benchmarks/results/self_tests.md, from the self-tests' JSONs beside it; nothing is measured.

python -m benchmarks.harness.acceptance_table
python -m benchmarks.harness.acceptance_table --results elsewhere --page page.md

A result is called acceptance_MACHINE_DATE.json.
"""

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness.render import ROOT, table
from parallel_backend.acceptance.report import FORMAT, VERSION

BEGIN, END = "<!-- made by benchmarks.harness.acceptance_table: -->", "<!-- until here -->"
"""Lines of the page between which the tables stand."""
Document = dict[str, Any]


def read(path: Path) -> Document:
    """ValueError for what is no self-test's result, or of a version that is not known here."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or (document.get("format"), document.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path} is no result of the self-test in version {VERSION}")
    return document


def figures(document: Document, check: str) -> dict[str, Any]:
    """Of a check; empty where it was not made or found none."""
    return next((each["figures"] for each in document["checks"] if each["name"] == check), {})


def machines(found: dict[Path, Document], page: Path) -> str:
    columns = ["machine", "software", "passed, failed, not looked at", "slowest link", "result"]
    rows = []
    for path, document in found.items():
        counts = ", ".join(str(document["summary"][status]) for status in ("passed", "failed", "not looked at"))
        link = f"[{document['date'][:10]}]({Path(os.path.relpath(path, page.parent)).as_posix()})"
        rows.append([machine(document), software(document), counts, slowest(document), link])
    return table(columns, rows)


def machine(document: Document) -> str:
    """'2 x NVIDIA L4', or the cores of one without GPUs under its ranks; and the ranks' devices where they share one."""
    system, devices = figures(document, "system"), document["devices"]
    if not all(device.startswith("cuda") for device in devices):
        return f"{len(devices)} CPU ranks, {system.get('cores')} cores"
    names = Counter(system["gpus"][int(device.partition(":")[2])]["name"] for device in sorted(set(devices)))
    shared = "" if len(set(devices)) == len(devices) else f", {len(devices)} ranks"
    return ", ".join(f"{count} x {name}" for name, count in names.items()) + shared


def software(document: Document) -> str:
    system = figures(document, "system")
    versions = {"torch": system.get("libraries", {}).get("torch"), "CUDA": system.get("cuda"), "ROCm": system.get("rocm")}
    versions |= {"NCCL": system.get("nccl"), "driver": system.get("driver")}
    return ", ".join([str(system.get("transport")), *(f"{name} {version}" for name, version in versions.items() if version)])


def slowest(document: Document) -> str | None:
    links = figures(document, "links").get("links", {}).get("between", {})
    if not links:
        return None
    link = min(links.values(), key=lambda each: each["GB_per_s"])
    return f"{link['GB_per_s']} GB/s, {link['us']} us"


def models(found: dict[Path, Document]) -> str:
    """One row for each run of a model file; the speed-up is over one rank."""
    columns = ["model", "machine", "mode", "seconds a step", "speed-up", "largest peak, GB", "dB from the first run"]
    rows = []
    for document in found.values():
        model = figures(document, "model file")
        alone = next((run["seconds_per_step"] for run in model.get("runs", []) if run["mode"] == "one rank"), None)
        for run in model.get("runs", []):
            speed = None if alone is None else f"{alone / run['seconds_per_step']:.2f}x"
            peaks = run.get("peak_bytes")
            peak = peaks and f"{max(peaks) / 1e9:.1f}"
            name = f"{model['file']} ({model['weight_dtype']}), latent {' x '.join(map(str, model['latent'][1:]))}"
            rows.append([name, machine(document), run["mode"], run["seconds_per_step"], speed, peak, run.get("dB")])
    return table(columns, rows) if rows else ""


def render(results: Path, page: Path) -> str:
    """The page with the tables of all results. ValueError for a page without the two lines."""
    found = {path: read(path) for path in sorted(results.glob("acceptance_*.json"))}
    text = page.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no lines {BEGIN} and {END}")
    tables = "\n\n".join(part for part in (machines(found, page), models(found)) if part)
    return f"{head}{begin}\n\n{tables}\n\n{end}{tail}"


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "results" / "self_tests.md")
    given = options.parse_args(arguments)
    given.page.write_text(render(given.results, given.page), encoding="utf-8")


if __name__ == "__main__":
    main()
