"""The self-test on two CPU ranks in processes: every check passes."""

import json
import time

import jsonschema
import pytest

from parallel_backend.acceptance import checks, report
from parallel_backend.acceptance.session import OwnModel, Settings
from parallel_backend.quickstart.model import WEIGHTS, mini_flux
from testing import mini

pytestmark = [pytest.mark.processes, pytest.mark.alone]

CONFIG = mini.config_of(WEIGHTS)
OWN = OwnModel(WEIGHTS, mini_flux(**CONFIG), mini.example(CONFIG, 16, 16), (1.0, 0.5))
SHORT = Settings(("cpu", "cpu"), OWN, steps=3)


def test_two_cpu_ranks_pass():
    started = time.monotonic()
    results = checks.run(SHORT)
    found = report.document_of(SHORT, results, time.monotonic() - started)
    jsonschema.validate(json.loads(report.dumps(found)), json.loads(report.SCHEMA.read_text()))
    assert [result.name for result in results] == list(checks.CHECKS)
    others = {result.name: (result.status, result.why) for result in results if result.status != checks.PASSED}
    assert others == {"transports": (checks.NOT_LOOKED_AT, "ranks on these devices do not use NCCL")}
    model = next(result for result in results if result.name == "model file")
    modes = ["one rank", *(f"{axis} 2" for axis in ("ulysses_degree", "ring_degree", "tensor_parallel_degree"))]
    assert [run["mode"] for run in model.figures["runs"]] == [*modes, "pipefusion_degree 2"]
    assert [text.partition(":")[0] for text in model.left_out] == ["the same model without ranks"]
    assert "runs: mode pipefusion_degree 2, " in report.describe(found)
