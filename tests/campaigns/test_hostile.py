"""A cross-section of `python -m tests.campaigns.hostile`."""

import pytest

from tests.campaigns.fuzz.runner import run
from tests.campaigns.hostile.__main__ import KINDS
from tests.campaigns.hostile.loras import loras
from tests.comfyui.conftest import comfyui  # noqa: F401 (a fixture)

SEED = 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("own classes", 20), ("quantised", 16), ("GGUF", 6)])
def test_files_are_named_or_run(kind, count):
    with KINDS[kind][1]() as make:
        report = run(kind, make, count, SEED)
    assert not report.defects, next(iter(report.defects.values()))
    assert {"refused", "run"} <= set(report.outcomes), report


@pytest.mark.full
@pytest.mark.comfyui
def test_lora_files_are_named_or_right(comfyui, tmp_path):  # noqa: F811
    with loras(comfyui, tmp_path) as make:
        report = run("LoRA", make, 16, SEED)
    assert not report.defects, next(iter(report.defects.values()))
    assert {"refused", "run"} <= set(report.outcomes), report
