"""Faults that the emulated devices have to notice.

Each fault is a few lines against torch.cuda that a real device would let pass, or punish with other timing.
"""

import gc
import multiprocessing

import pytest
import torch

from testing.fake_cuda import HOPPER
from tests.support.emulated_gpu import Violation, emulated

D = "cuda:0"


def side() -> torch.cuda.Stream:
    return torch.cuda.Stream(D)


def here() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def pinned(size: int = 100, value: float = 1.0) -> torch.Tensor:
    return torch.full((size,), value).pin_memory()


def captured(work) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which runs on the capture's stream."""
    graph, stream = torch.cuda.CUDAGraph(), side()
    stream.wait_stream(here())
    with torch.cuda.stream(stream):
        graph.capture_begin(None, "thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    here().wait_stream(stream)
    return graph


# ---- streams


def read_without_a_wait():
    with torch.cuda.stream(side()):
        b = torch.ones(10, device=D)
    b + 1


def write_over_what_is_read():
    other, a = side(), torch.ones(10, device=D)
    other.wait_stream(here())
    with torch.cuda.stream(other):
        a * 2
    a.zero_()


def freed_while_another_stream_reads():
    other, a = side(), torch.ones(10, device=D)
    other.wait_stream(here())
    with torch.cuda.stream(other):
        b = a * 2
    del a
    here().wait_stream(other)
    return b


# ---- page-locked memory


def source_changed_under_a_copy():
    h = pinned()
    there = h.to(D, non_blocking=True)
    h.zero_()
    torch.cuda.synchronize()
    return there


def coming(into: torch.Tensor) -> torch.Tensor:
    """A copy to it is under way."""
    return into.copy_(torch.ones(into.shape, device=D), non_blocking=True)


def read_before_it_came():
    coming(torch.empty(10, pin_memory=True)).sum()


# ---- graphs


def replayed_after_its_input_was_freed():
    inputs = [torch.ones(10, device=D)]
    graph = captured(lambda: inputs[0] * 2)
    inputs.clear()
    gc.collect()
    graph.replay()


NOTED = {
    read_without_a_wait: "reads what",
    write_over_what_is_read: "writes over what stream .* reads",
    freed_while_another_stream_reads: "are freed while",
    source_changed_under_a_copy: "changed under a copy to the device",
    read_before_it_came: "host reads memory that has not come",
    replayed_after_its_input_was_freed: "memory which has been freed",
}


@pytest.mark.parametrize("fault", NOTED, ids=lambda fault: fault.__name__)
def test_what_goes_well_by_chance_is_a_violation(fault):
    with pytest.raises(Violation, match=NOTED[fault]) as noted, emulated(HOPPER, HOPPER), torch.inference_mode():
        fault()
    assert "test_planted.py:" in str(noted.value)


def test_a_forked_processes_violations_come_home():
    def child() -> None:
        read_without_a_wait()

    with emulated(HOPPER, checks=False) as gpus:
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
        assert any("reads what" in each for each in gpus.record.violations)
