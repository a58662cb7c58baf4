"""The stand-in for torch.cuda is called as torch.cuda is, and its figures follow from one another."""

import inspect

import pytest
import torch

from tests.support.fake_cuda import AMPERE, GB, RDNA3, REPLACED, TURING, FakeCuda, fake_cuda


@pytest.mark.parametrize("name", [name for name in REPLACED if name != "Event"])
def test_it_takes_what_torchs_function_takes(name):
    theirs, ours = (inspect.signature(getattr(kind, name)).parameters for kind in (torch.cuda, FakeCuda))
    assert list(ours)[1:] == list(theirs)
    assert [ours[key].default for key in theirs] == [parameter.default for parameter in theirs.values()]


def test_cards_are_told_apart_and_gone_afterwards():
    with fake_cuda(TURING, AMPERE):
        assert torch.cuda.get_device_capability("cuda:1") == (8, 6)
        torch.cuda.set_device(1)
        assert torch.cuda.get_device_name() == torch.cuda.get_device_properties(torch.device("cuda")).name == AMPERE.name
        assert torch.version.cuda and not torch.version.hip
    with fake_cuda(RDNA3):
        assert torch.version.hip and not torch.version.cuda
    assert not torch.cuda.is_available()


def test_memory_is_held_kept_and_given_back():
    with fake_cuda(AMPERE) as cuda:
        cuda.hold_elsewhere(4 * GB)
        cuda.hold(6 * GB)
        cuda.hold(-2 * GB)  # freed, and kept by the allocator
        assert torch.cuda.mem_get_info() == (14 * GB, 24 * GB)
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (4 * GB, 6 * GB)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            cuda.hold(17 * GB)
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] == 16 * GB
        assert torch.cuda.max_memory_allocated() == 6 * GB


def test_events_follow_the_device_not_the_host():
    with fake_cuda(AMPERE) as cuda:
        first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        cuda.issue(2.0)
        second.record()
        assert first.query() and not second.query()
        with pytest.raises(RuntimeError, match="not ready"):
            first.elapsed_time(second)
        cuda.advance(1.0)
        assert not second.query() and cuda.waits == 0
        second.synchronize()
        assert first.elapsed_time(second) == 2000 and cuda.waits == 1
        cuda.issue(1.0)
        cuda.stuck[0] = True
        with pytest.raises(AssertionError, match="stuck"):
            torch.cuda.synchronize()
