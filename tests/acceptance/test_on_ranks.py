"""The self-test on two CPU ranks in processes: every check that needs no GPU passes."""

import json
import time

import jsonschema
import pytest

from parallel_backend.acceptance import document, kit
from parallel_backend.acceptance.lifetime import SETTLED
from parallel_backend.acceptance.report import describe
from parallel_backend.acceptance.session import OwnModel, Settings
from parallel_backend.quickstart.model import WEIGHTS, mini_flux
from testing import mini

pytestmark = [pytest.mark.processes, pytest.mark.alone]

OF_GPUS = ["page-locked", "graphs", "memory", "stuck GPU"]
CONFIG = mini.config_of(WEIGHTS)
OWN = OwnModel(mini_flux(**CONFIG), mini.example(CONFIG, 16, 16), (1.0, 0.5))
SHORT = Settings(("cpu", "cpu"), WEIGHTS, OWN, steps=3, cycles=2 * SETTLED, hang_seconds=2.0)


def test_two_cpu_ranks_pass(measured):
    started = time.monotonic()
    results = kit.run(SHORT)
    found = document.document_of(SHORT, results, time.monotonic() - started)
    measured("seconds of a short self-test", found["seconds"])
    jsonschema.validate(json.loads(document.dumps(found)), json.loads(document.SCHEMA.read_text()))
    assert [result.name for result in results] == list(kit.CHECKS)
    assert [result.name for result in results if result.status != kit.PASSED] == OF_GPUS, describe(found)
    assert all(
        result.status == kit.NOT_LOOKED_AT and "on CPUs" in result.why for result in results if result.name in OF_GPUS
    )
    assert any("topology" in text for text in results[0].left_out)  # what it could not look at is said
