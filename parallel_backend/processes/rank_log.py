"""Makes and reads the logs of ranks, which rank/start/log.py writes."""

import contextlib
import itertools
import os
import re
import shutil
import time
from pathlib import Path

KEPT = 16
"""Older folders that are kept. A pool whose folder goes works on, and its errors lack the end of its log."""
NAME = re.compile(r"\d{8}-\d{6}-\d+(-\d+)?")
"""Names of such folders."""
TAIL_LINES, STACK_LINES, WIDTH = 20, 30, 300
"""How much of a log an error shows: lines, or lines of a stack (most recent call first); characters of a line."""
TAIL_BYTES = 1 << 16
STACK, FATAL = "(most recent call first):", "Fatal Python error"
"""The first line of a thread's stack in faulthandler's output, and that of a crash. The main thread's stack comes last."""


def new_log_folder(logs: Path) -> Path:
    """A new folder in `logs` for the logs of one pool, named by time and process: pools of a machine, of this process or
    others, have their own. Of the others the newest KEPT stay.

    OSError if `logs` cannot be written to.
    """
    logs.mkdir(parents=True, exist_ok=True)
    others = [path for path in logs.iterdir() if NAME.fullmatch(path.name)]
    folder = _new_folder(logs, f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    for path in sorted(others, key=lambda path: path.name)[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    return folder


def _new_folder(parent: Path, name: str) -> Path:
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("the message has numbers without end")


def tail(path: Path) -> str:
    """The log's last lines, or the main thread's stack if stacks were dumped. Empty for an empty or missing log."""
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
