"""A rank's log file, with everything that the process prints and logs, and the stack of a crash. This module only needs the
standard library, because the log is opened before torch is imported."""

import contextlib
import faulthandler
import io
import logging
import os
import signal
import sys
from pathlib import Path


def write_log(path: Path, name: str) -> None:
    """From now on append everything that this process prints and logs, and the stack of a crash, to `path`. Warnings also go
    to the process's console, marked with `name`. On POSIX the signal SIGUSR1 appends all threads' stacks."""
    handlers: list[logging.Handler] = []
    with contextlib.suppress(OSError):  # a process without a console
        console = logging.StreamHandler(os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace"))
        console.setLevel(logging.WARNING)
        console.setFormatter(logging.Formatter(f"{name}: %(message)s"))
        handlers.append(console)
    file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    assert file.stream is not None
    for descriptor in (1, 2):  # of the process, so that output of libraries and child processes goes there too
        os.dup2(file.stream.fileno(), descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    logging.basicConfig(level=logging.INFO, handlers=[*handlers, file], force=True)
    logging.captureWarnings(True)
    faulthandler.enable(file.stream, all_threads=False)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file.stream, all_threads=True)
