"""What a soak has seen: how each prompt ended, and what the processes held after it."""

from dataclasses import dataclass, field

SERVER = "ComfyUI"
EMPTY = "empty"
"""The state after ComfyUI's button to free memory and then the Unload node: nothing is loaded. All other states are ""."""
FINISHED, CANCELLED, FAILED = "finished", "cancelled", "failed"


@dataclass(frozen=True)
class Ending:
    """A prompt's end. `cancel`: how it was to be cancelled, '' if it was not. `status`: one of those above.

    `difference`: the largest to the same request alone, 0 only if all bits are equal; None if there is nothing to compare.
    """

    number: int
    request: str
    setup: str
    cancel: str
    status: str
    difference: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Reading:
    """A process after prompt `number`, with nothing under way. `allocated`: bytes without pages of files, which come and go
    with what the system needs.

    `files`: entries of the temporary directory of all processes.
    """

    number: int
    state: str
    role: str
    pid: int
    allocated: int
    descriptors: int
    threads: int
    files: int


@dataclass
class Soak:
    """One soak. `window`: prompts in a round of all requests; `lived`: in all rounds, which the same ranks live through.

    `left`: what was still there after ComfyUI was stopped. `failures`: what went wrong beside the prompts.
    """

    seed: int
    window: int
    lived: int
    endings: list[Ending] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
