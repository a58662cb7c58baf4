"""What a rank's transfers moved and what they cost: bytes, time under way, and the part of it the rank stood still for."""

import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist


class PeerError(RuntimeError):
    """A transfer failed: the other rank, or the link to it, is gone."""


class Clock:
    """Points in time of a rank's work: the host's clock, or the stream's where NCCL's waits only stop the stream.

    There a wait costs the host nothing, so events stand in the stream before and behind it, read when the run is over.
    """

    def __init__(self, device: torch.device):
        self.on_stream = device.type == "cuda" and dist.is_initialized() and dist.get_backend() == "nccl"

    def now(self) -> "float | torch.cuda.Event":
        if not self.on_stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: "float | torch.cuda.Event", stop: "float | torch.cuda.Event") -> float:
        """Between two points; on a stream both must have been reached."""
        return start.elapsed_time(stop) / 1000 if self.on_stream else stop - start


class Traffic:
    """Counts from one report to the next. Bytes are payload that left this rank, by mesh axis.

    A transfer is under way from its start until the rank has waited for it. The hidden share of a run is the part of
    that time in which the rank was not waiting: 1 for receives that had arrived whenever they were needed, 0 for
    collectives that nothing runs beside.
    """

    def __init__(self, device: torch.device):
        self.clock = Clock(device)
        self.bytes_sent: Counter[str] = Counter()
        self._spans: list[tuple] = []  # (started, wait began, wait ended)

    def start(self, operation: Callable[[], list[dist.Work] | dist.Work]) -> "Transfer":
        """`operation` starts the transfer. PeerError if it cannot even be started."""
        started = self.clock.now()
        try:
            works = operation()
        except RuntimeError as error:
            raise PeerError(str(error)) from error
        return Transfer(self, works if isinstance(works, list) else [works], started)

    def note(self, started, waiting, done) -> None:
        self._spans.append((started, waiting, done))

    @property
    def mark(self) -> int:
        """The present, for `waited`."""
        return len(self._spans)

    def waited(self, mark: int = 0) -> float:
        """Seconds waited since then, or since the last report."""
        return sum(self.clock.seconds(waiting, done) for _, waiting, done in self._spans[mark:])

    def report(self) -> tuple[dict[str, int], float, float]:
        """(bytes by axis, seconds under way, seconds waited) since the last report."""
        under_way = sum(self.clock.seconds(started, done) for started, _, done in self._spans)
        waited, bytes_sent = self.waited(), dict(self.bytes_sent)
        self.bytes_sent.clear()
        self._spans.clear()
        return bytes_sent, under_way, waited


class Transfer:
    """One or several operations under way. Must be waited for; until then its tensors must be kept alive by the caller."""

    def __init__(self, traffic: Traffic, works: list[dist.Work], started):
        self._traffic, self._works, self._started = traffic, works, started

    def wait(self) -> None:
        waiting = self._traffic.clock.now()
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise PeerError(str(error)) from error
        self._traffic.note(self._started, waiting, self._traffic.clock.now())


def staged(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Gloo moves host memory only: CUDA tensors go through a copy."""
    return tensor.is_cuda and dist.get_backend(group) == "gloo"
