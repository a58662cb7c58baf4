"""What a model call changes inside the model's blocks, as guidance methods ask for it. Data that travels with a call's
conditioning: the stage that has a block applies what is about it."""

from dataclasses import dataclass

from .spans import Span


@dataclass(frozen=True)
class NormalizedGuidance:
    """Normalized attention guidance (arXiv 2505.21179): in every layer the image tokens' attention outputs of two sets of
    batch entries become one, which leads away from the second set's. Both get it."""

    scale: float
    """Of the way from the negative output to the positive one; 1 stays at the positive one."""
    tau: float
    """Most that a token's L1 norm may grow, as a factor."""
    alpha: float
    """Share of the guided output in the result. The rest is the positive output."""
    positive: Span
    """Batch entries of the call."""
    negative: Span
    """As many."""


@dataclass(frozen=True)
class BlockChanges:
    """The default changes nothing. Calls with other changes have K/V buffers of their own: they are other conditionings."""

    skipped: tuple[str, ...] = ()
    """Blocks "<list>.<index>" that give out what they are given (skip layer guidance)."""
    guidance: NormalizedGuidance | None = None

    @property
    def together(self) -> bool:
        """A layer looks at several batch entries at once, so all are in one micro-step of one replica."""
        return self.guidance is not None


UNCHANGED = BlockChanges()
