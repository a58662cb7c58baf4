"""One fault, as it is told to a rank. Imports nothing heavy: the first event of a rank is before that."""

from dataclasses import dataclass

INJECTED = "injected by a test"


@dataclass(frozen=True)
class Fault:
    """`moment`: how many of the phase's events pass on the victim before."""

    kind: str
    variant: str
    phase: str
    degrees: str
    victim: int
    moment: int

    def __str__(self) -> str:
        return f"{self.kind} ({self.variant}), {self.phase}, {self.degrees}, rank {self.victim}, event {self.moment}"
