"""Changes that guidance methods make inside the blocks for one model call.

They are sent with the call's conditioning. The stage that owns a block applies the changes of that block.
"""

from dataclasses import dataclass

from .spans import Span
from .sparse_attention import SparseAttention


@dataclass(frozen=True)
class NormalizedGuidance:
    """Normalized attention guidance (arXiv 2505.21179): each layer moves the attention output of image tokens from the
    negative batch entries' output towards the positive ones', and beyond. Both sets of entries get the result."""

    scale: float
    """Factor on the way from the negative output to the positive one; 1 gives the positive output."""
    tau: float
    """Limit of the growth of a token's L1 norm, as a factor."""
    alpha: float
    """Share of the guided output in the result. The rest is the positive output."""
    positive: Span
    """Batch entries of the call."""
    negative: Span
    """As many batch entries."""


@dataclass(frozen=True)
class BlockChanges:
    """The default changes nothing. Calls with different changes are different conditionings, with separate K/V buffers."""

    skipped: tuple[str, ...] = ()
    """Blocks "<list>.<index>" that return their input (skip layer guidance)."""
    guidance: NormalizedGuidance | None = None
    attention: str = ""
    """The kernel of all layers: a key of attention_kernels.KERNELS, or `sage.` and one of SAGE_VARIANTS. A rank that cannot
    run it takes torch's. Empty: the kernel that the model was loaded with."""
    sparse: SparseAttention | None = None
    """Layers see a part of the keys. None: all keys."""
    one_batch: bool = False
    """The model combines batch entries by itself."""

    @property
    def together(self) -> bool:
        """Whether layers combine batch entries. All entries are then in one micro-step of one replica."""
        return self.guidance is not None or self.one_batch


UNCHANGED = BlockChanges()
