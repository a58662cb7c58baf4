"""A cross-section of `python -m tests.campaigns.fuzz`, and that its runner sees what is wrong."""

import time

import pytest
import torch

from parallel_backend.wire import encoding
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


def test_an_error_a_hang_and_an_allocation_without_bounds_are_defects(monkeypatch):
    monkeypatch.setattr(runner, "SECONDS", 0.2)

    def defect(case) -> str:
        with runner.little_memory(lambda rng: case) as make:
            return runner.run("control", make, 1, SEED).defects[0]

    assert "IndexError" in defect(lambda: [][0])
    assert "Hang" in defect(lambda: time.sleep(60))
    assert "RuntimeError" in defect(lambda: torch.empty(1 << 34, dtype=torch.uint8))


def test_a_decoder_that_believes_everything_is_a_defect(monkeypatch):
    """As it was: tensors are made when the header is read."""

    def eager(self, value):
        tensor = torch.empty(value[1], dtype=torch.float32)
        self.append(encoding.Pending(tensor, value[1], tensor.nbytes))
        return tensor

    monkeypatch.setattr(encoding._Arriving, "add", eager)
    assert runner.run("headers", messages.headers(MESSAGES), 300, SEED).defects
