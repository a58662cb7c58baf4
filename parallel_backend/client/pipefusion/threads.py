"""Runs the bands' samplers, each in a separate thread."""

import contextvars
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from parallel_backend.processes.pool import POLL_SECONDS, Poll

from .banded_run import BandedRun

T = TypeVar("T")


def run_bands(run: BandedRun, sample: Callable[[int], T], on_event: Callable[[], None], poll: Poll) -> list[T]:
    """Return the results of `sample(band)` for every band, in order. Each band has a thread.

    `poll` and `on_event` are called on the calling thread meanwhile, which progress and previews need. An exception of
    theirs or of a band aborts all bands, and is raised after every thread has ended.
    """

    def work(band: int) -> T:
        try:
            with torch.inference_mode():
                result = sample(band)
            run.finish(band)
            return result
        except BaseException as error:
            run.abort(error)
            raise

    bands = range(len(run.rows))
    with ThreadPoolExecutor(len(bands), "band") as threads:
        futures = [threads.submit(contextvars.copy_context().run, work, band) for band in bands]
        try:
            while (state := wait(futures, POLL_SECONDS, FIRST_EXCEPTION)).not_done:
                for ended in state.done:
                    ended.result()
                poll()
                on_event()
        except BaseException as error:  # ComfyUI's Cancel is a BaseException
            run.abort(error)
            raise
    return [future.result() for future in futures]
