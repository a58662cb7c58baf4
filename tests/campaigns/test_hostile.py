"""A cross-section of `python -m tests.campaigns.hostile`."""

import pytest

from tests.campaigns.fuzz.runner import run
from tests.campaigns.hostile.__main__ import KINDS

SEED = 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("own classes", 20), ("quantised", 16), ("GGUF", 6)])
def test_files_are_named_or_run(kind, count):
    with KINDS[kind][1]() as make:
        report = run(kind, make, count, SEED)
    assert not report.defects, next(iter(report.defects.values()))
    assert {"refused", "run"} <= set(report.outcomes), report
