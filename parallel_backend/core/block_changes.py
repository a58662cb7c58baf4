"""Changes that guidance methods make inside the blocks for one model call. They are sent with the call's conditioning. The
stage that has a block applies its changes."""

from dataclasses import dataclass

from .spans import Span
from .sparse_attention import SparseAttention


@dataclass(frozen=True)
class NormalizedGuidance:
    """Normalized attention guidance (arXiv 2505.21179): each layer moves the attention output of image tokens from the
    negative batch entries' output towards the positive ones', and beyond. Both sets of entries get the result."""

    scale: float
    """Factor of the way from the negative output to the positive one; 1 gives the positive output."""
    tau: float
    """Largest growth of a token's L1 norm, as a factor."""
    alpha: float
    """Share of the guided output in the result. The rest is the positive output."""
    positive: Span
    """Batch entries of the call with the positive prompt."""
    negative: Span
    """Batch entries with the negative prompt, equally many."""


@dataclass(frozen=True)
class BlockChanges:
    """Changes of one call; by default none. Calls with different changes are different conditionings with separate K/V
    buffers."""

    skipped: tuple[str, ...] = ()
    """Blocks "<list>.<index>" that return their input (skip layer guidance)."""
    guidance: NormalizedGuidance | None = None
    attention: str = ""
    """The kernel of all layers: a key of attention_kernels.KERNELS, or `sage.` and a key of SAGE_VARIANTS. A rank that
    cannot run it uses torch's. Empty: the kernel with which the model was loaded."""
    sparse: SparseAttention | None = None
    """Settings with which layers only see a part of the keys. None: they see all keys."""
    one_batch: bool = False
    """Whether the model itself combines batch entries."""

    @property
    def together(self) -> bool:
        """Whether layers combine batch entries. All entries are then in one micro-step of one replica."""
        return self.guidance is not None or self.one_batch


UNCHANGED = BlockChanges()
