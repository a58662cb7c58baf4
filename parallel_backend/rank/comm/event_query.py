"""Asks the driver whether a device has passed an event, without holding Python's global lock.

torch's Event.query holds that lock. If the driver then waits for another thread of the rank, no Python thread runs, and the
rank sends no heartbeats. ctypes releases the lock during a call.
"""

import ctypes
import functools
import sys
from collections.abc import Callable

import torch

PASSED, NOT_PASSED = 0, 600
"""Results cudaSuccess and cudaErrorNotReady, with equal values in the driver's interface and in HIP."""
WINDOWS_DRIVER = "nvcuda.dll"
NAMES = ("cudaEventQuery", "hipEventQuery", "cuEventQuery")


def has_passed(event: torch.cuda.Event) -> bool:
    """Whether the device has passed the event. Waits only for the driver. Raises RuntimeError if the device has failed."""
    query, handle = event_query(), getattr(event, "cuda_event", 0)
    if query is not None and handle and (result := query(handle)) in (PASSED, NOT_PASSED):
        return result == PASSED
    return event.query()  # raises torch's error of a failed device


@functools.cache
def event_query() -> Callable[[int], int] | None:
    """Return the driver's query function, which takes an event's address. None without a GPU build of torch."""
    try:
        # On Linux torch's libraries, the runtime's among them, are open to all of the process.
        library = ctypes.CDLL(WINDOWS_DRIVER if sys.platform == "win32" else None)
    except OSError:
        return None
    found = next((getattr(library, name) for name in NAMES if hasattr(library, name)), None)
    if found is not None:
        found.argtypes, found.restype = (ctypes.c_void_p,), ctypes.c_int
    return found
