"""Lines and host time of a warm model call on ranks in threads. Run by serve.py, for benchmarks/speed/warm_call.py.

A trip begins at ComfyUI's `_apply_model` and ends at the attention kernel of rank 0, which is a function of ComfyUI or of
rank/attention/kernels. Its lines are those of nodes/ and parallel_backend/ that are executed: by the thread that calls until
it waits for the ranks, by rank 0's thread that receives, and by the one that computes until it first attends.
"""

import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from boot import PACK, Results, ksampler, node, parallel, random_prompts, sequence

sys.path.insert(0, str(PACK))
from parallel_backend.client.registry import registry
from parallel_backend.wire.sampling import Step
from testing.thread_ranks import thread_ranks

STEPS = 6
PRODUCT = tuple(str(PACK / folder) for folder in ("nodes", "parallel_backend"))
WORKER, CHANNEL = (str(PACK / "parallel_backend" / name) for name in ("rank/worker.py", "wire/channel.py"))
KERNELS = str(PACK / "parallel_backend/rank/attention/kernels")
Lines = set[tuple[str, int]]


class Trips:
    """The lines of the newest trip, by part of it."""

    def __init__(self) -> None:
        self.host: dict[int, Lines] = {}
        """By thread that calls the model."""
        self.received: list[Lines] = []
        self.computed: list[Lines] = []
        self._active: dict[int, Lines] = {}
        self._ranks: dict[int, int] = {}

    def trace(self, frame: Any, event: str, value: Any) -> Callable[..., Any]:
        """For sys.settrace."""
        file, name, thread = frame.f_code.co_filename, frame.f_code.co_name, threading.get_ident()
        if event == "call":
            self._called(file, name, thread, frame)
        elif event == "line" and thread in self._active and file.startswith(PRODUCT):
            self._active[thread].add((file, frame.f_lineno))
        elif event == "return" and (file, name) == (CHANNEL, "receive") and thread in self._active:
            lines = self._active.pop(thread)
            if value is not None and isinstance(value.message, Step):
                self.received.append(lines)
        return self.trace

    def _called(self, file: str, name: str, thread: int, frame: Any) -> None:
        if name == "_apply_model" and file.endswith("model_base.py"):
            self._active[thread] = self.host[thread] = set()
        elif name == "result" and file.endswith("futures/_base.py"):
            self._active.pop(thread, None)
        elif file == WORKER and name == "_read":
            self._ranks[thread] = frame.f_locals["self"].settings.rank
        elif (file, name) == (CHANNEL, "receive") and self._ranks.get(thread) == 0:
            self._active[thread] = set()
        elif (file, name) == (WORKER, "_handle") and frame.f_locals["self"].settings.rank == 0:
            if isinstance(frame.f_locals["message"], Step):
                self._active[thread] = set()
                self.computed.append(self._active[thread])
        elif file.startswith(KERNELS) or (name.startswith("attention_") and file.endswith("modules/attention.py")):
            self._active.pop(thread, None)

    def newest(self, parts: int) -> dict[str, Lines]:
        """`parts`: bands of the run."""
        host = list(self.host.values())
        bands = [each for thread, each in self.host.items() if thread != threading.main_thread().ident]
        host = bands if parts > 1 else host[:1]
        chosen = {"host": host, "receive": self.received[-parts:], "rank": self.computed[-parts:]}
        return {part: set().union(*lines) for part, lines in chosen.items()}


@contextmanager
def traced(trips: Trips):
    threading.settrace(trips.trace)
    sys.settrace(trips.trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def main(results: Results, files: bool = False) -> None:
    """`files`: tell the lines by file."""
    for mode, (make, bands) in MODES.items():
        results.case(mode, partial(measured, make, bands, files))


def measured(make: Callable[[], Any], bands: int, files: bool) -> dict[str, Any]:
    with ExitStack() as stack:
        start = stack.enter_context(thread_ranks())
        stack.enter_context(mock.patch.object(registry(), "start_of", lambda _devices: start))
        stack.callback(registry().close)
        model, trips = make(), Trips()
        sample = partial(ksampler, model, random_prompts(9, 9), torch.zeros(1, 16, 16, 16), steps=STEPS)
        sample()
        seconds = timed(model, sample)
        registry().close()  # a thread is traced from its start on
        with traced(trips):
            sample()
        parts = trips.newest(bands)
    every = set().union(*parts.values())
    told: dict[str, Any] = {part: len(lines) for part, lines in parts.items()}
    told |= {"lines": len(every), "files": len({file for file, _ in every}), "host_us": round(seconds * 1e6)}
    if files:
        counts = Counter(str(Path(file).relative_to(PACK)) for file, _ in every)
        told["by_file"] = dict(counts.most_common())
    return told


def timed(model: Any, sample: Callable[[], Any]) -> float:
    """CPU seconds of a warm call on the thread that makes it: the wait for ranks takes none. The least of the medians of
    several runs."""
    kind = type.__call__(type, model.model.diffusion_model)
    forward, found = kind.forward, []

    def clocked(self: Any, *arguments: Any, **named: Any) -> Any:
        began = time.thread_time()
        out = forward(self, *arguments, **named)
        found.append(time.thread_time() - began)
        return out

    medians = []
    with mock.patch.object(kind, "forward", clocked):
        for _ in range(5):
            found.clear()
            sample()
            medians.append(statistics.median(found[len(found) // 2 :]))
    return min(medians)


def in_bands(model: Any) -> Any:
    return node("ApplyPipeFusion", model, 2, 1, True, True)


MODES: dict[str, tuple[Callable[[], Any], int]] = {
    "one": (partial(parallel, "tiny.safetensors", pipe=1, devices="cpu"), 1),
    "ulysses": (lambda: parallel("tiny.safetensors", pipe=1, config=sequence(ulysses=2)), 1),
    "pipefusion": (lambda: in_bands(parallel("tiny.safetensors", pipe=2)), 2),
}
"""Mode -> (its MODEL, bands)."""
