"""What a soak has seen: how each prompt ended, and what the processes held after it."""

from dataclasses import dataclass, field

SERVER = "ComfyUI"
UNLOADED = "unloaded"
"""The state after the Unload node ran."""
EMPTY = "empty"
"""After ComfyUI's button to free memory and then the Unload node: nothing is loaded. Other states are a setup's name."""
FINISHED, CANCELLED, DELETED, FAILED = "finished", "cancelled", "deleted", "failed"


@dataclass(frozen=True)
class Ending:
    """A prompt's end. `cancel`: how it was to be cancelled, '' if it was not. `status`: one of those above.

    `where`: the node that was running when it was cancelled. `computed`: its sampler ran, rather than being answered from
    ComfyUI's cache. `difference`: the largest to the same request alone, 0 only where all bits are equal; None where there
    is nothing to compare.
    """

    number: int
    request: str
    setup: str
    cancel: str
    status: str
    seconds: float
    where: str = ""
    computed: bool = True
    difference: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Reading:
    """A process after prompt `number`, with nothing under way. Bytes: `uss` its own, `rss` with what it shares, `allocated`
    without pages of files, which come and go with what the system needs, and count as a process's own or not with what
    others have mapped: libraries alone make 20 MB of difference.

    `shared`: segments of /dev/shm that it has open or mapped. `files`, `file_bytes`: entries of the temporary directory of
    all processes, and what is in them.
    """

    number: int
    state: str
    role: str
    pid: int
    uss: int
    rss: int
    allocated: int
    descriptors: int
    threads: int
    shared: int
    files: int
    file_bytes: int


@dataclass
class Soak:
    """One soak. `window`: prompts in a round of all requests; `lived`: in all rounds, which the same ranks live through.

    `left`: what was still there after ComfyUI was stopped. `extras`: what was done beside the prompts, and how often;
    `failures`: what went wrong in that.
    """

    seed: int
    window: int
    lived: int
    references: int = 0
    seconds: float = 0.0
    endings: list[Ending] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    extras: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
