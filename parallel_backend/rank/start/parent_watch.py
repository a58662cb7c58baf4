"""A rank does not outlive the process that started it, whatever either of the two is doing."""

import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl(2)."""


def end_with_parent(directory: Path) -> None:
    """From now on this process removes `directory` and ends as soon as its parent has ended.

    The control connection ends then too, but nobody reads it while the rank is still being started: importing torch, waiting
    for the others. A rank that has been stopped (SIGSTOP) runs nothing at all. On Linux the system continues it: not kills
    it, since the signal comes when the *thread* that started it ends, which may be long before its process does, and since a
    killed rank could not remove its files. To a rank that runs the signal is nothing. Elsewhere a stopped rank stays
    until it is continued.
    """
    parent = multiprocessing.parent_process()
    if parent is None:  # started by something else, which ends it
        return

    def wait() -> None:
        parent.join()
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=wait, name="parent", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
