"""Whether CUDA itself stops the host, or does not: on the emulated devices too, which say the same without one."""

import time
import warnings

import pytest
import torch

from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.device_copies import to_device, to_host
from parallel_backend.core.pinned import pin
from parallel_backend.processes.pool import Pool
from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.shared_memory import make_segment
from testing import mini
from testing.models import on_ranks
from testing.thread_ranks import thread_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda:0")
LONG = 2_000_000_000
"""Cycles that a device sleeps in: about a second."""


def test_a_micro_step_does_not_stop_its_host(mini_file):
    """Counted by CUDA's own look-out for calls that wait, which waits for events are not. The rank is a thread, so that it
    counts here.
    """
    with thread_ranks() as start:
        pool = Pool((str(DEVICE),), start=start, silence=600.0)
        model = on_ranks(pool, mini.opened(mini_file), Degrees(), "fp32", "sdpa", lambda: None)
        x, _, tensors = mini.inputs()

        def run() -> None:
            sample_in_bands(model, x, linear_sigmas(3), Prompt(tensors, tensors, 1.0), 2, 1)

        run()  # what belongs to a prompt or a size is made once
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
                torch.ones(2, device=DEVICE).cpu()  # the control
            finally:
                torch.cuda.set_sync_debug_mode("default")
        stops = [f"{stop.filename}:{stop.lineno}" for stop in caught if "synchronizing CUDA operation" in str(stop.message)]
        assert len(stops) == 1 and __file__ in stops[0], stops
        pool.close()


def test_copies_to_a_busy_device_are_not_waited_for_and_those_from_it_are():
    values = [torch.randn(1000, 1000), torch.arange(10)]
    torch.cuda._sleep(LONG)
    started = time.perf_counter()
    there = [to_device(value, DEVICE) for value in values]
    assert time.perf_counter() - started < 0.3
    here = to_host([*there, values[0]])
    assert here[2] is values[0]
    assert all(map(torch.equal, here, values))


def test_a_segment_is_read_while_the_host_goes_on():
    segment = make_segment(1, 1 << 24)
    let_go = pin(segment.memory, DEVICE)
    values = segment.tensor(torch.float32, [1 << 20], 64).copy_(torch.randn(1 << 20))
    expected = values.clone()
    torch.cuda._sleep(LONG)
    started = time.perf_counter()
    there = values.to(DEVICE, non_blocking=True, copy=True)
    assert time.perf_counter() - started < 0.3
    assert torch.equal(there.cpu(), expected)
    let_go()
    segment.close()


def test_memory_that_cannot_be_pinned_is_no_error_of_the_next_kernel():
    segment = make_segment(1, 1 << 16)
    let_go = pin(segment.memory, DEVICE)
    assert pin(segment.memory, DEVICE) is None  # a second time: refused
    assert torch.ones(4, device=DEVICE).sum().item() == 4
    let_go()
    segment.close()


def test_a_heartbeat_says_where_a_busy_device_is():
    heartbeat = Heartbeat("micro-step 1")
    traffic = Traffic(DEVICE, heartbeat)
    traffic.mark(traffic.clock.now())
    torch.cuda._sleep(LONG)
    traffic.mark(traffic.clock.now(), idle=True)
    heartbeat.doing = "idle"
    heartbeat.ask()
    assert heartbeat.beat(0).doing == "micro-step 1"
    torch.cuda.synchronize()
    heartbeat.ask()
    assert heartbeat.beat(0).doing == "idle"
