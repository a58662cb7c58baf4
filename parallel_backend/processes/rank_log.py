"""A rank's own log: what it prints, what it logs, what it crashes with. The standard library alone: it is opened before
torch is imported."""

import contextlib
import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

TAIL_LINES, STACK_LINES, WIDTH = 20, 30, 300
"""Of a log's end as an error shows it: lines, lines of a stack (the most recent call first), characters of a line."""
TAIL_BYTES = 1 << 16
STACK, FATAL = "(most recent call first):", "Fatal Python error"
"""How faulthandler begins a thread's stack, of which the main thread's comes last, and what a crash is told with."""


def new_logs(folder: Path, count: int) -> list[Path]:
    """An empty log for each rank in `folder`. Those of the start before stay, as rank-0.log.1 and so on.

    OSError if the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"rank-{rank}.log" for rank in range(count)]
    for path in paths:
        # There is none yet; or, on Windows, a rank that is about to end still has it open, and it is written on.
        with contextlib.suppress(OSError):
            path.replace(path.with_name(f"{path.name}.1"))
        path.touch()
    return paths


def write_log(path: Path, name: str) -> None:
    """From now on all that this process prints, logs and crashes with goes to the end of `path`.

    Warnings are also shown where they were until now, marked with `name`. Where there are signals, SIGUSR1 adds the
    stacks of all threads.
    """
    handlers: list[logging.Handler] = []
    with contextlib.suppress(OSError):  # a process without a console
        console = logging.StreamHandler(os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace"))
        console.setLevel(logging.WARNING)
        console.setFormatter(logging.Formatter(f"{name}: %(message)s"))
        handlers.append(console)
    file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for descriptor in (1, 2):
        os.dup2(file.stream.fileno(), descriptor)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    logging.basicConfig(level=logging.INFO, handlers=[*handlers, file], force=True)
    logging.captureWarnings(True)
    faulthandler.enable(file.stream, all_threads=False)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file.stream, all_threads=True)


def tail(path: Path) -> str:
    """The log's last lines; where stacks were added to it, the main thread's. Empty if there is nothing in it."""
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
