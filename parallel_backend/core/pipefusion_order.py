"""The order of PipeFusion as data: the micro-steps of a sampling run, and what each of them waits for.

A *call* is one evaluation of the transformer by the sampler. An exact call is one micro-step over the whole latent; a banded
call is one micro-step per band. Every stage executes the same micro-steps in the same order. A micro-step moves only from
one stage to the next, so the traffic is acyclic. In PipeFusion (arXiv 2405.14430) the last stage sends back to the first;
here the sampler in the client is between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .spans import Span, split


@dataclass(frozen=True)
class MicroStep:
    call: int
    """Index of the call in the run."""
    band: int | None
    """The band whose rows are computed; None in an exact call, which computes the whole latent."""

    def covers(self, bands: int) -> range:
        """Return the bands whose rows the micro-step computes. It needs these bands' outputs of the previous call."""
        return range(bands) if self.band is None else range(self.band, self.band + 1)

    @property
    def with_text(self) -> bool:
        """Whether text tokens run through the blocks too. They do once in a call, with its first micro-step."""
        return self.band in (None, 0)


def call_steps(call: int, exact: bool, bands: int) -> tuple[MicroStep, ...]:
    """Micro-steps of one call, in order."""
    return (MicroStep(call, None),) if exact else tuple(MicroStep(call, band) for band in range(bands))


def micro_steps(exact: Sequence[bool], bands: int) -> list[MicroStep]:
    """Micro-steps of a whole run, in order. `exact[k]`: whether call k is exact."""
    return [step for call, whole in enumerate(exact) for step in call_steps(call, whole, bands)]


def entry_parts(entries: Span, exact: bool, stages: int) -> tuple[Span, ...]:
    """Return the batch entries of each micro-step. `exact`: whether the call is exact and its entries are independent. The
    entries of such a call go through the pipeline one by one, because nothing else can overlap in an exact call."""
    if not len(entries):
        return ()
    return split(entries, len(entries) if exact and stages > 1 else 1)


def window(stages: int) -> int:
    """Maximum number of micro-steps in progress: one on each stage, and one that waits for the first stage."""
    return stages + 1
