"""Runs each band's sampler in a thread of its own."""

import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from parallel_backend.processes.pool import POLL_SECONDS, Poll

from .banded_run import BandedRun

T = TypeVar("T")


def run_bands(run: BandedRun, sample: Callable[[int], T], on_event: Callable[[], None], poll: Poll) -> list[T]:
    """`sample(band)` for every band, each in a thread of its own; their results in order.

    `poll` and `on_event` run on the calling thread while the bands work (progress and previews belong to it). Whatever
    it or a band raises aborts all bands and is raised here, once every thread has ended.
    """
    results: dict[int, T] = {}
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work(band: int) -> None:
        try:
            with torch.inference_mode():
                results[band] = sample(band)
            run.finish(band)
            ended.put(None)
        except BaseException as error:
            run.abort(error)
            ended.put(error)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(work, band), name=f"band {band}", daemon=True)
        for band in range(len(run.rows))
    ]
    error: BaseException | None = None
    for thread in threads:
        thread.start()
    missing = len(threads)
    while missing:
        with contextlib.suppress(queue.Empty):
            failed = ended.get(timeout=POLL_SECONDS)
            missing -= 1
            error = error or failed
        if error is None:
            try:
                poll()
                on_event()
            except BaseException as raised:  # ComfyUI's Cancel is a BaseException
                error = raised
                run.abort(raised)
    for thread in threads:
        thread.join()
    if error is not None:
        raise error
    return [results[band] for band in range(len(threads))]
