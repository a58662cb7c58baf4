"""Asks the driver whether a device has passed an event, without Python's global lock.

torch's own Event.query keeps that lock. If the driver then waits for another thread of the rank, no thread of Python runs,
and the rank sends no heartbeats. ctypes lets go of the lock during a call.
"""

import ctypes
import functools
import sys
from collections.abc import Callable

import torch

PASSED, NOT_PASSED = 0, 600
"""Results: cudaSuccess and cudaErrorNotReady, alike in the driver's interface and in HIP."""
WINDOWS_DRIVER = "nvcuda.dll"
NAMES = ("cudaEventQuery", "hipEventQuery", "cuEventQuery")


def has_passed(event: torch.cuda.Event) -> bool:
    """Whether the event's device has passed it. Waits for the driver alone. RuntimeError if the device has failed."""
    query, handle = event_query(), getattr(event, "cuda_event", 0)
    if query is not None and handle and (result := query(handle)) in (PASSED, NOT_PASSED):
        return result == PASSED
    return event.query()  # raises torch's error of a failed device


@functools.cache
def event_query() -> Callable[[int], int] | None:
    """The driver's query, of an event's address. None where it is not found: without a GPU build of torch."""
    try:
        # On Linux torch's libraries, the runtime's among them, are open to all of the process.
        library = ctypes.CDLL(WINDOWS_DRIVER if sys.platform == "win32" else None)
    except OSError:
        return None
    found = next((getattr(library, name) for name in NAMES if hasattr(library, name)), None)
    if found is not None:
        found.argtypes, found.restype = (ctypes.c_void_p,), ctypes.c_int
    return found
