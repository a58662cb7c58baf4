"""Counts a rank's transfers: bytes, time in progress, and time that the rank waited."""

import functools
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.timeline_kinds import TRANSFER, WAIT

from .event_query import has_passed
from .recorder import Recorder

CUDA_FAILED = re.compile(r"CUDA error|Cuda failure", re.IGNORECASE)
"""Matches errors of the device. NCCL's "unhandled cuda error" ends with CUDA's name of the error."""
OUT_OF_MEMORY = re.compile(r"out of memory", re.IGNORECASE)


class PeerError(RuntimeError):
    """Raised if a transfer failed because the other rank, or the link to it, is gone."""


def is_of_a_transfer(error: RuntimeError) -> bool:
    """Whether another rank may have caused the error: a RuntimeError of Gloo or a DistError of NCCL."""
    # CUDA reports a kernel's failure at any later call, also at a transfer, and a communicator that finds no memory fails
    # like one whose peer is gone. Both are failures of this rank.
    plain = type(error) is RuntimeError or isinstance(error, dist.DistError)
    return plain and not CUDA_FAILED.search(str(error)) and not is_out_of_memory(error)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether this rank's device ran out of memory, also for a communicator."""
    return isinstance(error, torch.OutOfMemoryError) or bool(OUT_OF_MEMORY.search(str(error)))


class PeerErrors:
    """Context of calls of torch.distributed: raises PeerError if another rank may have caused the error. A class, since a
    generator's context takes four times as long."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, RuntimeError) and is_of_a_transfer(error):
            raise PeerError(str(error)) from error


class Clock:
    """Returns points in time of a rank's work: times of the host's clock, or on CUDA events in the stream. On CUDA the host
    runs ahead of the device and NCCL's waits do not block it, so the host's clock would not show them."""

    def __init__(self, device: torch.device):
        self.on_stream = device.type == "cuda"
        self.now: Callable[[], Any] = _event_now if self.on_stream else time.perf_counter


class Traffic:
    """Counts transfers from one report to the next. Bytes are the data that left this rank, by mesh axis. A transfer is in
    progress from its start until the rank has waited for it. `heartbeat`: the rank's, which sees every wait."""

    def __init__(self, device: torch.device, heartbeat: Heartbeat | None = None):
        self._device, self.clock = device, Clock(device)
        self.heartbeat = heartbeat or Heartbeat()
        self.bytes_sent: Counter[str] = Counter()
        self.recorder = Recorder(self.clock.now if self.clock.on_stream else None)

    def mark(self, at: "float | torch.cuda.Event", waiting: bool = False, idle: bool = False) -> None:
        """On CUDA, pass the device's state from the event `at` on to the heartbeat, see Heartbeat.mark."""
        if self.clock.on_stream:
            self.heartbeat.mark(functools.partial(_passed, at, self._device), waiting, idle)

    def start(self, operation: Callable[[], list[dist.Work] | dist.Work | None]) -> "Transfer":
        """Start a transfer by calling `operation`. Raises PeerError if it cannot be started."""
        started = self.clock.now()
        with PeerErrors():
            works = operation()
        assert works is not None, "a transfer in a group that this rank is not in"
        return Transfer(self, works if isinstance(works, list) else [works], started)

    def run(self, operation: Callable[[], dist.Work | None]) -> None:
        """`start` and `wait` at once. On CUDA this records one event less, because nothing is launched in between."""
        self.start(operation).wait(at_once=True)

    def report(self) -> tuple[dict[str, int], float, float]:
        """Return (bytes by axis, seconds in progress, seconds waited) since the last report."""
        bytes_sent = dict(self.bytes_sent)
        self.bytes_sent.clear()
        return bytes_sent, self.recorder.drain(TRANSFER), self.recorder.drain(WAIT)


class Transfer:
    """One or several operations in progress. Must be waited for; until then the caller keeps the tensors alive."""

    def __init__(self, traffic: Traffic, works: list[dist.Work], started):
        self._traffic, self._works, self._started = traffic, works, started
        self._step = traffic.recorder.step

    def wait(self, at_once: bool = False) -> None:
        """Wait for the operations. `at_once`: nothing has been computed since the start. Raises PeerError."""
        traffic, recorder, heartbeat = self._traffic, self._traffic.recorder, self._traffic.heartbeat
        waiting = self._started if at_once else traffic.clock.now()
        traffic.mark(waiting, waiting=True)
        heartbeat.waiting = True
        with PeerErrors():
            for work in self._works:
                work.wait()
        heartbeat.waiting = False
        heartbeat.done()
        done = traffic.clock.now()
        traffic.mark(done)
        recorder.add(TRANSFER, self._step, self._started, done)
        recorder.add(WAIT, recorder.step, waiting, done)


def _event_now() -> "torch.cuda.Event":
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _passed(event: "torch.cuda.Event", device: torch.device) -> bool:
    """Whether the device has passed the event. Called on the heartbeat's thread."""
    torch.cuda.set_device(device)  # a thread begins with device 0, and the query would create a context there
    return has_passed(event)
