"""Streams, events, and what the host waits for: vector clocks in the place of time.

Every operation is a tick of its stream. A stream knows, by its clock, which operations of other streams come before what it
does next: by waits for streams and events, and because the host had waited for them.
"""

import contextlib
import itertools
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from .machine import ROOT, Clock, Gpu, machine, merge, where

CYCLES = 2e9
"""Clock rate of the emulated devices, in Hz, for torch.cuda._sleep."""


MODES = ("default", "warn", "error")
DEFAULT, WARN, ERROR = range(3)
"""Of torch.cuda.set_sync_debug_mode."""


class _Here(threading.local):
    """Of each thread: the current device, the current stream of each, the capture under way. `stops_are_errors`: in that
    capture, by torch.cuda.set_sync_debug_mode, since a thread that captures stands in for a process."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.capture: Any = None
        self.stops_are_errors = False


here = _Here()


def index_of(device: Any) -> int:
    """As torch reads it: a number, a name or a torch.device; None, or one without a number, is the current one."""
    if device is None:
        return here.device
    index: int | None
    if isinstance(device, int):
        index = device
    else:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        index = device.index
    index = here.device if index is None else index
    if not 0 <= index < len(machine.gpus):
        raise RuntimeError("CUDA error: invalid device ordinal")
    return index


def gpu(device: Any = None) -> Gpu:
    return machine.gpus[index_of(device)]


class Stream:
    """As torch.cuda.Stream. `tick`: its operations so far. `clock`: what its next operation comes after."""

    numbers = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        self.gpu = gpu(device)
        self.device = torch.device("cuda", self.gpu.index)
        self.device_index, self.priority = self.gpu.index, priority
        self.stream_id = self.cuda_stream = next(Stream.numbers)
        self.tick = 0
        self.clock: Clock = {}
        self.busy_until = 0.0
        """Of time.monotonic."""
        self.capture: Any = None
        """The Capture that it is a part of."""
        self.gpu.streams.append(self)

    def op(self) -> int:
        """The next operation begins. Called with the machine's lock held."""
        merge(self.clock, self.gpu.host)
        self.tick += 1
        self.clock[self] = self.tick
        return self.tick

    def sleep(self, cycles: int) -> None:
        with machine.lock:
            self.op()
            self.busy_until = max(self.busy_until, time.monotonic()) + cycles / CYCLES

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        with machine.lock:
            merge(self.clock, event.clock or {})
            self.busy_until = max(self.busy_until, event.done_at)
            if event.capture is not None and event.capture is here.capture:
                event.capture.join(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        wait_of_host("stream.synchronize")
        self.reach()

    def reach(self) -> None:
        """The host waits until all that is on the stream is over."""
        time.sleep(max(0.0, self.busy_until - time.monotonic()))
        self.gpu.learn(dict(self.clock))

    def query(self) -> bool:
        ask_while_capturing()
        if time.monotonic() < self.busy_until:
            return False
        self.gpu.learn(dict(self.clock))
        return True

    def __repr__(self) -> str:
        return f"stream {self.stream_id} of cuda:{self.gpu.index}"


class Event:
    """As torch.cuda.Event. It is not over when it is first asked, unless the host has waited: code that only works on a fast
    device shows.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any):
        self._timed, self._asked = enable_timing, False
        self.clock: Clock | None = None
        self.done_at = 0.0
        self.capture: Any = None
        self._gpu: Gpu | None = None
        self._at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with machine.lock:
            stream.op()
            self.clock, self._gpu, self._asked = dict(stream.clock), stream.gpu, False
            self.done_at, self.capture = stream.busy_until, stream.capture
            self._at = max(time.monotonic(), stream.busy_until)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        ask_while_capturing()
        if self._gpu is None or self.clock is None or self._is_known_over(self._gpu, self.clock):
            return True
        if not self._asked or time.monotonic() < self.done_at:
            self._asked = True
            return False
        self._gpu.learn(self.clock)
        return True

    def synchronize(self) -> None:
        wait_of_host("event.synchronize")
        if self._gpu is not None and self.clock is not None:
            time.sleep(max(0.0, self.done_at - time.monotonic()))
            self._gpu.learn(self.clock)

    @staticmethod
    def _is_known_over(of: Gpu, clock: Clock) -> bool:
        return all(of.host.get(stream, 0) >= tick for stream, tick in clock.items())

    def elapsed_time(self, end_event: "Event") -> float:
        for event in (self, end_event):
            if not event._timed:
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if event._gpu is None or event.clock is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            if not self._is_known_over(event._gpu, event.clock):
                raise RuntimeError("CUDA error: device not ready")
        return 1000 * (end_event._at - self._at)


def current_stream(device: Any = None) -> Stream:
    of = gpu(device)
    return here.streams.get(of.index, of.default)


@contextlib.contextmanager
def stream_context(stream: Stream | None) -> Iterator[None]:
    """torch.cuda.stream: its device becomes the current one too."""
    if stream is None:
        yield
        return
    index, device, before = stream.gpu.index, here.device, here.streams.get(stream.gpu.index)
    here.device, here.streams[index] = index, stream
    try:
        yield
    finally:
        here.device = device
        if before is None:
            del here.streams[index]
        else:
            here.streams[index] = before


@contextlib.contextmanager
def device_context(device: Any) -> Iterator[None]:
    """torch.cuda.device."""
    before = here.device
    if device is not None and (not isinstance(device, int) or device >= 0):
        here.device = index_of(device)
    try:
        yield
    finally:
        here.device = before


def set_device(device: Any) -> None:
    here.device = index_of(device)


def synchronize(device: Any = None) -> None:
    of = gpu(device)
    wait_of_host("synchronize")
    for stream in list(of.streams):
        stream.reach()


def stop(what: str) -> None:
    """An operation that has the host wait for the device. RuntimeError where torch.cuda.set_sync_debug_mode says so."""
    said = "called a synchronizing CUDA operation"
    if here.stops_are_errors:
        raise RuntimeError(said)
    wait_of_host(what)
    if machine.sync_debug_mode == WARN:
        path, _, line = where(1).partition(" ")[0].rpartition(":")
        warnings.warn_explicit(said, UserWarning, str(ROOT / path), int(line))


def wait_of_host(what: str) -> None:
    """The host waits for the device here. RuntimeError in a capture, which it makes invalid."""
    if here.capture is not None:
        here.capture.forbid(what)
    machine.record.stop(what)


def set_sync_debug_mode(mode: str | int) -> None:
    number = MODES.index(mode) if isinstance(mode, str) else mode
    if here.capture is None:
        assert number != ERROR
        machine.sync_debug_mode = number
    else:
        here.stops_are_errors = number == ERROR


def ask_while_capturing() -> None:
    """Of a query, on whatever thread: those captures that it makes invalid are."""
    for of in machine.gpus:
        for stream in list(of.streams):
            if stream.capture is not None:
                stream.capture.asked()
