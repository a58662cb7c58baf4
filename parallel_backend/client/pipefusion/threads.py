"""Runs the bands' samplers, each in a separate thread."""

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
    """The results of `sample(band)` for every band, in order. Each band has a thread.

    `poll` and `on_event` run on the calling thread meanwhile, to which progress and previews belong. An exception of theirs
    or of a band aborts all bands, and is raised once every thread has ended.
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
