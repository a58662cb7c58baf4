"""Creates the folders of the ranks' logs, which rank/start/log.py writes, and reads the ends of the logs."""

import os
import re
import shutil
import tempfile
import time
from pathlib import Path

KEPT = 16
"""Number of older folders that are kept. A pool whose folder is deleted continues, but its errors cannot quote the log."""
NAME = re.compile(r"\d{8}-\d{6}-\d+-\w+")
"""Matches the names of these folders."""
TAIL_LINES, STACK_LINES, WIDTH = 20, 30, 300
"""How much of a log an error shows: the number of lines, of lines of a stack (most recent call first), and of characters per
line."""
TAIL_BYTES = 1 << 16
STACK, FATAL = "(most recent call first):", "Fatal Python error"
"""How faulthandler's output begins for a thread's stack, and for a crash. The main thread's stack comes last."""


def new_log_folder(logs: Path) -> Path:
    """Create a folder in `logs` for the logs of one pool and return it. Its name begins with the time and the process. The
    newest KEPT other folders stay, older ones are deleted.

    Raises OSError if `logs` cannot be written to.
    """
    logs.mkdir(parents=True, exist_ok=True)
    others = [path for path in logs.iterdir() if NAME.fullmatch(path.name)]
    folder = Path(tempfile.mkdtemp(prefix=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-", dir=logs))
    for path in sorted(others, key=lambda path: path.name)[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    return folder


def tail(path: Path) -> str:
    """Return the log's last lines, or the main thread's stack if stacks were dumped; empty for an empty or missing log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    stacks = [number for number, line in enumerate(lines) if line.endswith(STACK)]
    if stacks:
        first = next((number for number, line in enumerate(lines) if line.startswith(FATAL)), stacks[-1])
        lines = lines[first : stacks[-1] + STACK_LINES]
    else:
        lines = lines[-TAIL_LINES:]
    return "\n".join(line[:WIDTH] for line in lines)
