"""Parallel Self-Test in ComfyUI: its own model beside ranks, what the node leaves behind, and Cancel.

All its checks on real ranks are in tests/acceptance/test_on_ranks.py.
"""

import json

import jsonschema
import pytest

from parallel_backend.acceptance.report import SCHEMA

pytestmark = pytest.mark.comfyui

EXACT = 80.0
"""Decibels between fp32 samples of the same model: ComfyUI's own, and ours on one rank and on two."""


@pytest.fixture(scope="module")
def looked(inside):
    return inside.run("acceptance")[0]


def test_comfyuis_own_model_is_run_beside_the_ranks_with_its_last_call(looked):
    found = looked["own class"]
    assert found["refusal"].startswith("model: tiny.safetensors has not been called yet, and its test repeats the last")
    document = found["document"]
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert document == found["saved"]
    assert found["shown"]
    assert found["others_ended"]  # which would share the devices with the self-test's
    assert "JSON: " in found["text"]
    system, model = document["checks"]
    assert [check["status"] for check in (system, model)] == ["passed", "passed"], found["text"]
    host = system["figures"]["host"]
    assert host.startswith("ComfyUI ")
    assert "--cpu" in system["figures"]["host_options"]
    native, *runs = model["figures"]["runs"]
    assert native["mode"] == f"{host}, no ranks"
    assert [run["mode"] for run in runs] == [
        "one rank",
        "ulysses_degree 2",
        "ring_degree 2",
        "tensor_parallel_degree 2",
        "pipefusion_degree 2",
    ]
    assert min(run["dB"] for run in runs[:-1]) >= EXACT
    assert "2 ranks" in found["trace"] or "rank 0" in found["trace"], found["trace"]
