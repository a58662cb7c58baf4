"""Settings of glibc's allocator on Linux: freed memory is kept during a run. Does nothing on other systems.

Activations are allocated and freed in every block. By default glibc returns larger ones to the system at once, which must
then clear the same pages again: 130 MB a step of a small model, 6 % of a CPU rank's time. Between prompts `give_back`
returns the memory.
"""

import ctypes
import sys
from collections.abc import Callable

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
"""Keys of mallopt (malloc.h)."""
KEPT_BYTES = 1 << 30
"""Number of bytes of freed memory that are kept at the end of a heap."""
LARGEST_IN_HEAP = 1 << 25
"""Bytes of the largest allocation from a heap, the most that glibc allows. Larger ones are mapped individually."""


def keep_freed() -> None:
    """Keep freed memory for the next allocations from now on."""
    if mallopt := _of_glibc("mallopt"):
        mallopt(MMAP_THRESHOLD, LARGEST_IN_HEAP)
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(ARENA_MAX, 1)  # tensors are received by one thread and freed by another: two heaps would get holes


def give_back() -> None:
    """Return freed memory to the system."""
    if trim := _of_glibc("malloc_trim"):
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
