"""The logs of ranks as their pool makes and reads them. rank/start/log.py writes them."""

import contextlib
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
