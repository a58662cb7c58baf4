"""Weights on their way from a file to a device, through pieces of page-locked memory."""

import pytest
import torch

from parallel_backend.core import device_copies
from parallel_backend.core.device_copies import StagedUpload
from testing.fake_cuda import HOPPER
from tests.support.emulated_gpu import emulated

SOURCES = {
    "a vector": torch.arange(5.0),
    "a matrix of several pieces": torch.randn(60, 30),
    "columns": torch.randn(20, 40)[:, 3:17],
    "another dtype": torch.randn(30, 30, dtype=torch.float16),
    "nothing": torch.empty(0, 4),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(device_copies, "STAGING_BYTES", 1024)


@pytest.mark.parametrize("name", SOURCES)
def test_it_comes_as_it_is(name):
    """Also when the pieces hold something else already, and when the file's memory changes at once."""
    with emulated(HOPPER) as gpus, torch.inference_mode():
        upload, source = StagedUpload(), SOURCES[name].clone(memory_format=torch.preserve_format)
        filling, target = torch.empty(250, device="cuda:0"), torch.empty(source.shape, device="cuda:0")
        gpus.record.stops.clear()
        for _ in range(3):
            upload.copy(filling, torch.zeros(250))
        upload.copy(target, source)
        source.fill_(-1.0)
        assert {stop.partition(": ")[2].split()[0] for stop in gpus.record.stops} <= {"event.synchronize"}
        torch.cuda.synchronize()
        assert torch.equal(target.cpu(), SOURCES[name].float())
