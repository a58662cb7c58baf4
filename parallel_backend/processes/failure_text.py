"""The words of a RankError: which rank, what it was doing, how it ended, what to change, and what it left behind."""

import re
import signal
from collections.abc import Sequence
from pathlib import Path

from parallel_backend.wire.lifecycle import IDLE

OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|MemoryError|can't allocate memory|bad_alloc", re.IGNORECASE)
KILLED = "was killed by signal 9"
FILE_GONE = f"was killed by signal {int(getattr(signal, 'SIGBUS', 0))}"
"""By Linux and macOS, for reading beyond the end of a file that was cut after it was mapped."""
LESS_MEMORY = (
    "raise pipefusion_degree or tensor_parallel_degree, so that each device holds less of the weights (ulysses_degree does "
    "not change that), set weight_dtype to fp8_e4m3fn, or use a smaller latent or batch."
)
"""What to change, by the names of widgets and inputs; the end of a sentence."""
RESTART = "Queue the prompt again, which starts new ranks."

P2P_OFF = (
    "P2P off: NCCL's self-test of the links failed with direct access between GPUs, so transfers go through host memory"
)
"""Of ranks that were started anew without it."""


def out_of_memory(text: str) -> bool:
    """Whether an error's text is, or may be, about memory that was not to be had."""
    return KILLED in text or bool(OUT_OF_MEMORY.search(text))


def last_seen(doing: str) -> str:
    """`doing`: see lifecycle.HeartbeatMessage; empty for a rank that was never seen."""
    return f", last seen {doing if doing == IDLE else f'in {doing}'}" if doing else ""


def failed(name: str, doing: str, summary: str) -> str:
    """Of a rank that raised. The summary's first line will do: the traceback repeats it."""
    advice = f"\nTo need less memory, {LESS_MEMORY}" if OUT_OF_MEMORY.search(summary) else ""
    return f"{name} failed in {doing}: {(summary.splitlines() or [''])[0]}{advice}"


def died(name: str, how: str, doing: str, log: str) -> str:
    """Of a rank that is gone without a word. `doing`: what it was last seen to do, or empty."""
    advice = ""
    if how == KILLED:
        advice = f" If the system ended it for want of memory, {LESS_MEMORY}"
    elif how == FILE_GONE:
        advice = (
            " It read from the model's file what is not there any more: the file was cut or overwritten meanwhile, or its "
            f"disk fails. Once the file is whole: {RESTART[0].lower()}{RESTART[1:]}"
        )
    elif OUT_OF_MEMORY.search(log):
        advice = f" To need less memory, {LESS_MEMORY}"
    return f"{name} {how}{last_seen(doing)}.{advice}"


def explained(text: str, traceback: str, logs: Sequence[str], kept: Path | None) -> str:
    """`text` is the first line, which ComfyUI shows. `logs`: the ends of logs that say more. `kept`: the logs' folder."""
    parts = [f"Parallel DiT: {text}", traceback.rstrip()]
    parts += [f"The end of its log:\n{log}" for log in logs if log]
    parts.append(f"The ranks' logs: {kept}" if kept is not None else "")
    return "\n".join(part for part in parts if part)
