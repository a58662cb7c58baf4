"""Builds the text of a RankError: the rank, its work, how it ended, what the user can change, and the end of its log."""

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel_backend.wire.lifecycle import IDLE

OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|MemoryError|can't allocate memory|bad_alloc", re.IGNORECASE)
DEVICE_FULL = re.compile(r"OutOfMemoryError|(CUDA|HIP|Cuda failure|Hip failure)[^\n]*out of memory")
"""Matches the summary of a failure caused by too little memory of a device, not of the host. NCCL quotes the driver's
error."""
DEVICE_LOST = re.compile(
    r"(CUDA|HIP) error: [^\n]*(ECC|illegal memory access|launch failure|launch timed out|unavailable|unknown error)"
)
"""Matches the summary of a failure after which a GPU may be unusable."""
ASKED = re.compile(r"Tried to allocate ([0-9.]+) ([KMG]i)?B")
"""Matches torch's statement of the size of the allocation that failed."""
UNITS = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
OUT_OF_FILES = re.compile(r"too many open files", re.IGNORECASE)
"""Matches the operating system's message, which errors of libraries contain too."""
MORE_FILES = "Start ComfyUI in a shell in which `ulimit -n` gives a larger number."
KILLED = "was killed by signal 9"
FILE_GONE = f"was killed by signal {int(getattr(signal, 'SIGBUS', 0))}"
"""How a rank ends if its model file was cut after mapping: Linux and macOS send SIGBUS to a process that reads beyond the
end of a mapped file."""
LESS_MEMORY = (
    "raise pipefusion_degree or tensor_parallel_degree, so that each device has less of the weights (ulysses_degree "
    "does not change that), set weight_dtype to fp8_e4m3fn, or use a smaller latent or batch."
)
"""How the user can make a model need less memory, by widgets and inputs. It is the end of a sentence."""
RESTART = "Queue the prompt again, which starts new ranks."

NVLINK_ALONE = (
    "P2P over NVLink alone: other transfers go through host memory, because direct access over PCIe failed NCCL's self-test "
    "or was slower"
)
"""Note for the user about ranks with P2P over NVLink alone."""
P2P_OFF = (
    "P2P off: transfers go through host memory, because direct access between GPUs failed NCCL's self-test or was slower"
)
"""Note for the user about ranks without P2P."""
NCCL_OFF = (
    "NCCL off: its self-test of the links failed with and without direct access between GPUs, so Gloo copies each "
    "transfer through host memory on both sides. This is slower and does not overlap with computation"
)
"""Note for the user after ranks were started again without NCCL."""


def out_of_memory(text: str) -> bool:
    """Whether an error's text says, or may mean, that memory ran out."""
    return KILLED in text or bool(OUT_OF_MEMORY.search(text))


def asked(summary: str) -> int:
    """Return the size in bytes of the allocation that failed, or 0 if the failure's summary does not say it."""
    found = ASKED.search(summary)
    return round(float(found[1]) * UNITS[found[2]]) if found else 0


def last_seen(doing: str) -> str:
    """Return a clause about the rank's last known work. `doing`: lifecycle.HeartbeatMessage.doing, or empty before a
    heartbeat."""
    return f", last seen {doing if doing == IDLE else f'in {doing}'}" if doing else ""


def unanswered(seconds: Mapping[int, float]) -> str:
    """Return sentences about drivers that do not answer. `seconds` maps a rank to the time without an answer."""
    return "".join(f" The GPU's driver has not answered rank {rank} for {time:.0f} s." for rank, time in seconds.items())


def failed(name: str, doing: str, summary: str) -> str:
    """Return the text about a rank that raised an exception. It uses the first line of `summary`: the traceback has the
    rest."""
    advice = ""
    if OUT_OF_MEMORY.search(summary):
        advice = f"\nTo need less memory, {LESS_MEMORY}"
    elif OUT_OF_FILES.search(summary):
        advice = f"\nA process may have too few files open. {MORE_FILES}"
    return f"{name} failed in {doing}: {(summary.splitlines() or [''])[0]}{advice}"


def died(name: str, how: str, doing: str, log: str) -> str:
    """Return the text about a rank that ended without a report. `doing` is its last known work, or empty; `log` the end of
    its log."""
    advice = ""
    if how == KILLED:
        advice = f" If the system ended it because memory ran out, {LESS_MEMORY}"
    elif how == FILE_GONE:
        advice = (
            " It read a part of the model's file that no longer exists: the file was cut or overwritten, or its disk "
            f"fails. When the file is complete: {RESTART[0].lower()}{RESTART[1:]}"
        )
    elif OUT_OF_MEMORY.search(log):
        advice = f" To need less memory, {LESS_MEMORY}"
    return f"{name} {how}{last_seen(doing)}.{advice}"


def explained(text: str, traceback: str, logs: Sequence[str], kept: Path | None) -> str:
    """Return the complete error text. ComfyUI shows its first line, `text`. `logs` are ends of logs, `kept` the logs'
    folder."""
    parts = [f"Parallel DiT: {text}", traceback.rstrip()]
    parts += [f"The end of its log:\n{log}" for log in logs if log]
    parts.append(f"The ranks' logs: {kept}" if kept is not None else "")
    return "\n".join(part for part in parts if part)
