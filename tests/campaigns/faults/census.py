"""What a process has at a moment, and what it has kept that it should not have."""

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

Census = dict[str, Counter[str]]


def take(folder: Path) -> Census:
    """By kind. `folder`: for temporary files."""
    gc.collect()  # what an error's traceback holds on to
    own = psutil.Process()
    listening = (str(each.laddr) for each in own.net_connections("inet") if each.status == psutil.CONN_LISTEN)
    return {
        "processes": Counter({"of ranks": len(own.children(recursive=True))}),
        "threads": Counter(thread.name for thread in threading.enumerate()),
        "descriptors": Counter({"open": own.num_fds()}),
        "listening sockets": Counter(listening),
        "temporary files": Counter({"of ranks": len(list(folder.iterdir()))}),
    }


def left_over(before: Census, after: Census) -> list[str]:
    """What is in `after` and was not in `before`, in words. Both are of moments with as many ranks."""
    return [f"{kind}: {dict(more)}" for kind, found in after.items() if (more := found - before[kind])]


def settle(look: Callable[[], list[str]], seconds: float) -> list[str]:
    """What `look` finds, once it finds nothing or time is up: the system takes a moment to clear up."""
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
