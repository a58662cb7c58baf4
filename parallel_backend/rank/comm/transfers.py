"""What a rank's transfers moved and what they cost: bytes, time under way, and the part of it the rank stood still for."""

import functools
import re
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.timeline_kinds import TRANSFER, WAIT

from .recorder import Recorder

CUDA_FAILED = re.compile(r"CUDA error|Cuda failure", re.IGNORECASE)
"""In the text of an error that is the device's own. NCCL's "unhandled cuda error" ends with CUDA's name for it."""
OUT_OF_MEMORY = re.compile(r"out of memory", re.IGNORECASE)


class PeerError(RuntimeError):
    """A transfer failed: the other rank, or the link to it, is gone."""


def is_of_a_transfer(error: RuntimeError) -> bool:
    """Whether the error is one of the transfer, behind which another rank may be, rather than of this rank's own device.

    Gloo raises plain RuntimeErrors, NCCL DistErrors. CUDA reports what went wrong in any kernel before at whatever call
    comes next, and a communicator that finds no memory fails as one whose peer is gone does: both are this rank's own.
    """
    plain = type(error) is RuntimeError or isinstance(error, dist.DistError)
    return plain and not CUDA_FAILED.search(str(error)) and not is_out_of_memory(error)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether this rank's device had too little memory, also for a communicator."""
    return isinstance(error, torch.OutOfMemoryError) or bool(OUT_OF_MEMORY.search(str(error)))


class Clock:
    """Points in time of a rank's work: the host's clock, or on CUDA the stream's.

    There the host runs ahead, and NCCL's waits cost it nothing: events stand in the stream before and behind them.
    """

    def __init__(self, device: torch.device):
        self.on_stream = device.type == "cuda"

    def now(self) -> "float | torch.cuda.Event":
        if not self.on_stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Elapsed:
    """Adds up the seconds between points in time, in order of their ends.

    The oldest BATCH are added up when UNREAD newer ones stand behind them: nothing is collected for ever where nobody asks
    for a report, and on CUDA the host does not wait for what its device has yet to do.
    """

    UNREAD, BATCH = 4096, 64

    def __init__(self, clock: Clock):
        self._on_stream = clock.on_stream
        self._pairs: list[tuple] = []
        self._seconds = 0.0

    def add(self, start: "float | torch.cuda.Event", stop: "float | torch.cuda.Event") -> None:
        self._pairs.append((start, stop))
        if len(self._pairs) == self.UNREAD + self.BATCH:
            self._add_up(self.BATCH)

    def seconds(self) -> float:
        """So far. On CUDA it waits until the stream has come to the last end."""
        self._add_up(len(self._pairs))
        return self._seconds

    def _add_up(self, count: int) -> None:
        """The oldest."""
        oldest, self._pairs = self._pairs[:count], self._pairs[count:]
        if self._on_stream and oldest:
            oldest[-1][1].synchronize()
            self._seconds += sum(start.elapsed_time(stop) for start, stop in oldest) / 1000
        else:
            self._seconds += sum(stop - start for start, stop in oldest)

    def drain(self) -> float:
        """So far, and start again at zero."""
        seconds, self._seconds = self.seconds(), 0.0
        return seconds


class Traffic:
    """Counts from one report to the next. Bytes are payload that left this rank, by mesh axis.

    A transfer is under way from its start until the rank has waited for it. The hidden share of a run is the part of
    that time in which the rank was not waiting: 1 for receives that had arrived whenever they were needed, 0 for
    collectives that nothing runs beside. `heartbeat`: of the rank, which is told of every wait.
    """

    def __init__(self, device: torch.device, heartbeat: Heartbeat | None = None):
        self._device, self.clock = device, Clock(device)
        self.heartbeat = heartbeat or Heartbeat()
        self.bytes_sent: Counter[str] = Counter()
        self.under_way, self.waited = Elapsed(self.clock), Elapsed(self.clock)
        self.recorder = Recorder(self.clock.now if self.clock.on_stream else None)

    def mark(self, at: "float | torch.cuda.Event", waiting: bool = False, idle: bool = False) -> None:
        """On CUDA, tell the heartbeat what the device does from the event `at` on: see Heartbeat.mark."""
        if self.clock.on_stream:
            self.heartbeat.mark(functools.partial(_passed, at, self._device), waiting, idle)

    def start(self, operation: Callable[[], list[dist.Work] | dist.Work]) -> "Transfer":
        """`operation` starts the transfer. PeerError if it cannot even be started."""
        started = self.clock.now()
        try:
            works = operation()
        except RuntimeError as error:
            if not is_of_a_transfer(error):
                raise
            raise PeerError(str(error)) from error
        return Transfer(self, works if isinstance(works, list) else [works], started)

    def report(self) -> tuple[dict[str, int], float, float]:
        """(bytes by axis, seconds under way, seconds waited) since the last report."""
        bytes_sent = dict(self.bytes_sent)
        self.bytes_sent.clear()
        return bytes_sent, self.under_way.drain(), self.waited.drain()


class Transfer:
    """One or several operations under way. Must be waited for; until then its tensors must be kept alive by the caller."""

    def __init__(self, traffic: Traffic, works: list[dist.Work], started):
        self._traffic, self._works, self._started = traffic, works, started
        self._step = traffic.recorder.step

    def wait(self) -> None:
        waiting = self._traffic.clock.now()
        self._traffic.mark(waiting, waiting=True)
        heartbeat = self._traffic.heartbeat
        heartbeat.waiting = True
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            if not is_of_a_transfer(error):
                raise
            raise PeerError(str(error)) from error
        heartbeat.waiting = False
        heartbeat.done()
        done = self._traffic.clock.now()
        self._traffic.mark(done)
        self._traffic.under_way.add(self._started, done)
        self._traffic.waited.add(waiting, done)
        self._traffic.recorder.add(TRANSFER, self._step, self._started, done)
        self._traffic.recorder.add(WAIT, self._traffic.recorder.step, waiting, done)


def _passed(event: "torch.cuda.Event", device: torch.device) -> bool:
    """Asked on the heartbeat's thread, whose device is the first one until it is set: a look would make a context there."""
    torch.cuda.set_device(device)
    return event.query()
