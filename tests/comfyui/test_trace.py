"""Parallel Trace in a running ComfyUI: behind a sampler, by itself, and where there is nothing to show yet."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.comfyui_server import ComfyUIServer, Outcome
from tests.comfyui.test_server import SAMPLER, workflow

pytestmark = pytest.mark.comfyui

TRACE, SHOWN = "40", "41"


def nodes(**inputs: Any) -> dict[str, Any]:
    """Parallel Trace, and a node that shows its report."""
    given = {"filename_prefix": "traces/of_this_test", **inputs}
    return {
        TRACE: {"class_type": "ParallelTrace", "inputs": given},
        SHOWN: {"class_type": "PreviewAny", "inputs": {"source": [TRACE, 0]}},
    }


def shown(server: ComfyUIServer, outcome: Outcome) -> tuple[str, dict[str, Any]]:
    """The report, which the node shows too, and the trace file."""
    assert outcome.status == "success", outcome.error
    (report,) = outcome.outputs[SHOWN]["text"]
    assert outcome.outputs[TRACE]["text"] == [report]
    path = Path(re.search(r"^(.*\.json) opens in", report, re.MULTILINE)[1])
    assert path.parent == server.base / "output" / "traces"
    return report, json.loads(path.read_text())


def steps(trace: dict[str, Any]) -> list[int]:
    """Micro-steps by rank."""
    found = [event["pid"] for event in trace["traceEvents"] if event.get("cat") == "compute"]
    return [found.count(rank) for rank in sorted(set(found))]


def test_it_shows_the_run_before_it_and_then_the_next_one(server):
    prompt = workflow(seed=51, num_pipeline_patch=2, width=128, height=128, steps=6) | nodes(after=[SAMPLER, 0])
    report, trace = shown(server, server.run(prompt))
    assert "quickstart-digits, pipefusion_degree 2: " in report
    assert "hidden behind computing" in report
    # An exact call takes the positive and the negative prompt one by one, a band both at once.
    assert steps(trace) == [2 + 5 * 2] * 2

    again, same = shown(server, server.run(prompt))
    assert again.splitlines()[:-1] == report.splitlines()[:-1]  # the sampler was not run again, so it was still the last
    assert again.splitlines()[-1] != report.splitlines()[-1]
    assert same == trace

    alone, same = shown(server, server.run(nodes()))
    assert alone.splitlines()[:-1] == report.splitlines()[:-1]
    assert same == trace

    prompt[SAMPLER]["inputs"] |= {"seed": 52, "steps": 3}
    assert steps(shown(server, server.run(prompt))[1]) == [2 + 2 * 2] * 2


def test_trace_file_elsewhere_is_refused(server):
    prompt = workflow(seed=53, width=64, height=64, steps=1) | nodes(filename_prefix="../../elsewhere", after=[SAMPLER, 0])
    outcome = server.run(prompt)
    assert outcome.status == "error"
    assert "filename_prefix: '../../elsewhere' cannot be written" in outcome.error
    assert "outside the output folder is not allowed" in outcome.error
