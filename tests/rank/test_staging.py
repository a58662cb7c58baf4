"""Host copies of CUDA tensors under Gloo: where they are page-locked. What only a device can show is in tests/gpu."""

import sys

import pytest
import torch

from parallel_backend.rank.comm import staging

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.mark.parametrize(
    ("platform", "device", "locked"),
    [("linux", CUDA, True), ("win32", CUDA, False), ("linux", CPU, False), ("win32", CPU, False)],
)
def test_copies_are_page_locked_where_that_is_safe(monkeypatch, platform, device, locked):
    asked = []
    plain = torch.empty

    def empty(*shape, pin_memory, **named):
        asked.append(pin_memory)
        return plain(*shape, **named)

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch, "empty", empty)
    buffer = staging.host_buffer((2, 3), torch.bfloat16, device)
    assert asked == [locked]
    assert (buffer.shape, buffer.dtype, buffer.device) == ((2, 3), torch.bfloat16, CPU)


def test_a_host_copy_is_complete_contiguous_and_its_own():
    x = torch.arange(6.0).view(2, 3).T
    copy = staging.to_staging(x)
    assert torch.equal(copy, x) and copy.is_contiguous()
    x.zero_()
    assert copy.sum() == 15
    assert staging.from_staging(copy, CPU) is copy
