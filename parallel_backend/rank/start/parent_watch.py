"""Ends a rank's process together with the process that started it, even if one of them is blocked."""

import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

from parallel_backend.core.parent_process import ParentProcess

PR_SET_PDEATHSIG = 1
"""The option of Linux's prctl(2)."""
LOOK_SECONDS = 1.0
"""Seconds between two checks of the parent, if the system does not report its end."""


def end_with_parent(directory: Path) -> None:
    """Make this process remove `directory` and end as soon as its parent process has ended. On Linux a rank that was stopped
    (SIGSTOP) then continues and ends. On other systems it stays until somebody continues it."""
    process = multiprocessing.parent_process()
    if process is None:  # started by another program (Ray), which ends it
        return
    parent = ParentProcess(process)

    def look() -> None:
        while not parent.has_ended(LOOK_SECONDS):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)

    # A thread, since nobody reads the control connection while the rank imports torch or waits for other ranks.
    threading.Thread(target=look, name="parent", daemon=True).start()
    if sys.platform == "linux":
        # SIGCONT instead of SIGKILL: it comes when the *thread* that started the rank ends, perhaps long before the process,
        # and does nothing to a running rank. A killed rank could not remove its files.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
