"""How a rank's allocator deals with freed memory on Linux, where it is glibc's; elsewhere nothing is done.

Activations are allocated and freed in every block. By default glibc gives larger ones back to the system at once, which
then hands out the same pages anew, cleared: 130 MB a step of a small model, 6 % of a CPU rank's time. Between prompts it
is given back, so that what ranks hold then is what they need.
"""

import ctypes
import sys
from collections.abc import Callable

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
"""mallopt's names for its settings (malloc.h)."""
KEPT_BYTES = 1 << 30
"""Freed memory at the end of a heap that is kept."""
LARGEST_IN_HEAP = 1 << 25
"""Bytes of an allocation that still comes from a heap. glibc allows no more; larger ones are mapped one by one."""


def keep_freed() -> None:
    """Freed memory is kept for the next allocation from now on; `give_back` returns it."""
    if mallopt := _of_glibc("mallopt"):
        mallopt(MMAP_THRESHOLD, LARGEST_IN_HEAP)
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(ARENA_MAX, 1)  # what one thread allocates and another frees, such as what is received, leaves holes in two


def give_back() -> None:
    """Return freed memory to the system."""
    if trim := _of_glibc("malloc_trim"):
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
