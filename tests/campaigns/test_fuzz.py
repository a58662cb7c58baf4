"""A cross-section of `python -m tests.campaigns.fuzz`."""

import pytest

from tests.campaigns.fuzz.__main__ import KINDS
from tests.campaigns.fuzz.runner import run

FEW = {  # kind -> cases, and what comes of some: otherwise they would all be of one sort
    "headers of messages": (1000, {"refused", "read"}),
    "streams of messages": (300, {"refused", "ended"}),
    "bytes from a rank": (40, {"refused", "ended"}),
    "own classes": (20, {"refused", "run"}),
    "quantised": (16, {"refused", "run"}),
    "GGUF": (6, {"refused", "run"}),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * ("messages" not in kind)) for kind in FEW])
def test_damaged_input_is_refused_or_harmless(kind):
    count, outcomes = FEW[kind]
    with KINDS[kind][1]() as make:
        report = run(kind, make, count, seed=1)
    assert not report.defects, next(iter(report.defects.values()))
    assert outcomes <= set(report.outcomes), report
