"""Faults that the emulated devices have to notice, one each.

Each fault is a few lines against torch.cuda that a real device would let pass, or punish with other timing.
"""

import gc
import multiprocessing
import threading

import pytest
import torch

from tests.support.emulated_gpu import Violation, emulated
from tests.support.emulated_gpu.host import page_locked
from tests.support.emulated_gpu.nccl import EmulatedNccl
from tests.support.fake_cuda import GB, HOPPER

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


def a_peer_that_does_not_wait():
    """Copies between devices wait for both current streams, and for no other one."""
    there = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(there):
        a = torch.ones(10, device="cuda:1")
    a.to(D)


# ---- page-locked memory


def source_changed_under_a_copy():
    h = pinned()
    there = h.to(D, non_blocking=True)
    h.zero_()
    torch.cuda.synchronize()
    return there


def target_written_under_a_copy():
    h = torch.empty(10, pin_memory=True)
    h.copy_(torch.ones(10, device=D), non_blocking=True)
    h.zero_()
    torch.cuda.synchronize()


def coming(into: torch.Tensor) -> torch.Tensor:
    """A copy to it is under way."""
    return into.copy_(torch.ones(into.shape, device=D), non_blocking=True)


def read_before_it_came():
    coming(torch.empty(10, pin_memory=True)).sum()


def read_in_registered_memory():
    h, runtime = torch.ones(5000), torch.cuda.cudart()
    assert runtime.cudaHostRegister(h.data_ptr(), h.nbytes, 1) == 0
    coming(h[:100])[50].item()
    torch.cuda.synchronize()
    runtime.cudaHostUnregister(h.data_ptr())


def unregistered_under_a_copy():
    h = torch.ones(5000)
    runtime = torch.cuda.cudart()
    assert runtime.cudaHostRegister(h.data_ptr(), h.nbytes, 1) == 0
    there = h.to(D, non_blocking=True)
    runtime.cudaHostUnregister(h.data_ptr())
    return there


# ---- graphs


def launched_beside_a_capture():
    """As SageAttention's kernels, which know nothing of torch's current stream."""
    a, default = torch.ones(10, device=D), here()

    def work():
        b = a * 2
        with torch.cuda.stream(default):
            b.add_(1)

    captured(work)


def replayed_after_its_input_was_freed():
    inputs = [torch.ones(10, device=D)]
    graph = captured(lambda: inputs[0] * 2)
    inputs.clear()
    gc.collect()
    graph.replay()


# ---- NCCL


def on_two_ranks(work) -> None:
    """`work(rank, nccl)` on two threads, each a rank of one world."""
    nccl, errors = EmulatedNccl(), []
    world = nccl.world(2)

    def run(rank: int) -> None:
        nccl.enter(world, rank)
        torch.cuda.set_device(rank)
        try:
            work(rank, nccl)
        except Exception as error:  # raised below
            errors.append(error)
            world.end()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def received_and_not_waited_for():
    def work(rank: int, nccl: EmulatedNccl) -> None:
        x = torch.ones(10, device=f"cuda:{rank}")
        if rank:
            nccl.irecv(x, 0).work.wait()  # the transfer is over, and the current stream does not wait for it
            x + 1
        else:
            nccl.isend(x, 1).wait()

    on_two_ranks(work)


NOTED = {
    read_without_a_wait: "reads what",
    write_over_what_is_read: "writes over what stream .* reads",
    freed_while_another_stream_reads: "are freed while",
    a_peer_that_does_not_wait: "reads what",
    source_changed_under_a_copy: "changed under a copy to the device",
    target_written_under_a_copy: "changed under a copy to the host",
    read_before_it_came: "host reads memory that has not come",
    read_in_registered_memory: "host reads memory that has not come",
    unregistered_under_a_copy: "no longer page-locked",
    launched_beside_a_capture: "is not in the graph",
    replayed_after_its_input_was_freed: "memory which has been freed",
    received_and_not_waited_for: "reads what",
}


@pytest.mark.parametrize("fault", NOTED, ids=lambda fault: fault.__name__)
def test_what_goes_well_by_chance_is_a_violation(fault):
    with pytest.raises(Violation, match=NOTED[fault]) as noted, emulated(HOPPER, HOPPER), torch.inference_mode():
        fault()
    assert "test_planted.py:" in str(noted.value)


# ---- what a device refuses at once


def tensors_of_device_and_host():
    torch.ones(3, device=D) + torch.ones(3)


def more_memory_than_there_is():
    torch.empty(100 * GB, dtype=torch.uint8, device=D)


def more_page_locked_memory_than_the_driver_gives():
    page_locked.budget = 1000
    torch.empty(2000, dtype=torch.uint8, pin_memory=True)


def a_stop_in_a_capture():
    a = torch.ones(10, device=D)
    captured(lambda: a[0].item())


def tensors_of_the_host_in_nccl():
    on_two_ranks(lambda rank, nccl: nccl.all_reduce(torch.ones(3)))


def flash_attention_in_fp32():
    q = torch.ones(1, 1, 4, 8, device=D)
    torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)


REFUSED = {
    tensors_of_device_and_host: "same device",
    more_memory_than_there_is: "CUDA out of memory",
    more_page_locked_memory_than_the_driver_gives: "out of memory",
    a_stop_in_a_capture: "during capture",
    tensors_of_the_host_in_nccl: "No backend type",
    flash_attention_in_fp32: "bf16 or fp16",
}


@pytest.mark.parametrize("fault", REFUSED, ids=lambda fault: fault.__name__)
def test_what_a_device_refuses_is_refused(fault):
    refused = pytest.raises((RuntimeError, TypeError), match=REFUSED[fault])
    with emulated(HOPPER, HOPPER, checks=False), torch.inference_mode(), refused:
        fault()


# ---- what is counted or read from the card


def test_values_that_come_to_the_host_stop_it():
    with emulated(HOPPER) as gpus, torch.inference_mode():
        a = torch.ones(3, device=D)
        assert gpus.record.stops == []
        stopping = {
            "item": lambda: a[0].item(),
            "nonzero": a.nonzero,
            "a mask": lambda: a[a > 0],
            "bool": lambda: bool(a[0]),
            "cpu": a.cpu,
            "tensor": lambda: torch.tensor([1.0], device=D),
            "equal": lambda: torch.equal(a, a),
            "a pageable copy": lambda: torch.ones(3).to(D, non_blocking=True),
            "synchronize": torch.cuda.synchronize,
        }
        for number, (name, work) in enumerate(stopping.items(), 1):
            work()
            assert len(gpus.record.stops) == number, (name, gpus.record.stops)


def test_a_forked_processes_violations_come_home():
    def child() -> None:
        read_without_a_wait()

    with emulated(HOPPER, checks=False) as gpus:
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
        assert any("reads what" in each for each in gpus.record.violations)
