"""Copies to a CUDA device go through page-locked memory where that is safe. Its calls, on a stand-in; CUDA's own are in
tests/gpu."""

import logging
import sys

import pytest
import torch

from parallel_backend.core import device_copies
from parallel_backend.core.device_copies import host_buffer, to_device, to_host

CUDA = torch.device("cuda:0")


class OnHost:
    """A tensor of the host that notes what is asked of it. `pinned`: it is page-locked already."""

    def __init__(self, pinned: bool, notes: list):
        self.device, self.dtype, self.pinned, self.notes = torch.device("cpu"), torch.float32, pinned, notes

    def is_pinned(self) -> bool:
        return self.pinned

    def pin_memory(self) -> "OnHost":
        self.notes.append("pin")
        return OnHost(True, self.notes)

    def to(self, *given, **named) -> "OnHost":
        self.notes.append((*given, *named.items()))
        return self


@pytest.mark.parametrize(
    ("platform", "pinned", "expected"),
    [
        ("linux", False, ["pin", (CUDA, ("non_blocking", True)), (torch.bfloat16,)]),
        ("linux", True, [(CUDA, ("non_blocking", True)), (torch.bfloat16,)]),
        ("win32", False, [(CUDA, torch.bfloat16, ("non_blocking", True), ("copy", False))]),
    ],
)
def test_a_copy_to_cuda_is_from_page_locked_memory_where_that_is_safe(monkeypatch, platform, pinned, expected):
    """And its values become the device's dtype there: a conversion on the host would take them out of such memory."""
    notes = []
    monkeypatch.setattr(sys, "platform", platform)
    to_device(OnHost(pinned, notes), CUDA, torch.bfloat16)
    assert notes == expected


REFUSED = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"


@pytest.fixture
def driver(monkeypatch) -> list[str]:
    """What the driver answers to who asks for page-locked memory: put its error here."""
    errors, plain = [], torch.empty

    def empty(*shape, pin_memory=False, **named):
        if pin_memory and errors:
            raise torch.AcceleratorError(errors[0])
        return plain(*shape, **named)

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch, "empty", empty)
    device_copies._tell_of_refusal.cache_clear()
    return errors


def test_where_no_memory_is_page_locked_any_more_copies_go_through_other_memory(driver, monkeypatch, caplog):
    """As under WSL 2, which gives 0.5 to 1 GiB of it. The user is told once."""

    def refuse() -> OnHost:
        raise torch.AcceleratorError(REFUSED)

    driver.append(REFUSED)
    buffer = host_buffer((2, 3), torch.bfloat16, CUDA)
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((2, 3), torch.bfloat16, "cpu")
    notes: list = []
    tensor = OnHost(False, notes)
    monkeypatch.setattr(tensor, "pin_memory", refuse)
    with caplog.at_level(logging.WARNING):
        to_device(tensor, CUDA, torch.bfloat16)
        host_buffer((4,), torch.float32, CUDA)
    assert notes == [(CUDA, ("non_blocking", True)), (torch.bfloat16,)]
    assert caplog.text.count("gives no more page-locked memory (CUDA error: out of memory)") == 1


def test_on_the_host_nothing_is_copied_that_need_not_be():
    x = torch.randn(3)
    here = torch.device("cpu")
    assert to_device(x, here) is x
    assert to_host([x])[0] is x
    copy = to_device(x, here, copy=True)
    assert copy is not x
    assert torch.equal(copy, x)
    assert to_device(x, here, torch.float64).dtype == torch.float64
