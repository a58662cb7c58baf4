"""A cross-section of `python -m tests.campaigns.fuzz`."""

import pytest

from tests.campaigns.fuzz import messages, ranks, runner
from tests.wire.test_messages import MESSAGES

SEED = 1


def sound(report: runner.Report, *outcomes: str) -> None:
    """No defects, and each of these came of some case: otherwise the cases would all be of one kind."""
    assert not report.defects, next(iter(report.defects.values()))
    assert set(outcomes) <= set(report.outcomes), report


def test_messages():
    sound(runner.run("headers", messages.headers(MESSAGES), 1000, SEED), "refused", "read")
    sound(runner.run("streams", messages.streams(MESSAGES), 300, SEED), "refused", "ended")


@pytest.mark.slow
def test_bytes_from_a_rank():
    sound(runner.run("client", ranks.into_client(MESSAGES), 40, SEED), "refused", "ended")
