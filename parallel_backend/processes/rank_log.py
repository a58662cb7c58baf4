"""Makes and reads the logs of ranks, which rank/start/log.py writes."""

import contextlib
from pathlib import Path

TAIL_LINES, STACK_LINES, WIDTH = 20, 30, 300
"""How much of a log an error shows: lines, or lines of a stack (most recent call first); characters of a line."""
TAIL_BYTES = 1 << 16
STACK, FATAL = "(most recent call first):", "Fatal Python error"
"""The first line of a thread's stack in faulthandler's output, and that of a crash. The main thread's stack comes last."""


def new_logs(folder: Path, count: int) -> list[Path]:
    """An empty log for each rank in `folder`. Logs of the last start are kept as rank-0.log.1 and so on.

    OSError if the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"rank-{rank}.log" for rank in range(count)]
    for path in paths:
        # The log does not exist yet; or, on Windows, a rank that is ending has it open, and the new rank appends to it.
        with contextlib.suppress(OSError):
            path.replace(path.with_name(f"{path.name}.1"))
        path.touch()
    return paths


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
