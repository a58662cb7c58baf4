"""Settings of block-sparse attention in a model call, as in ComfyUI's node *Model Sparse Attention*.

A query block of 64 tokens attends to all tokens of some key blocks. Of each other key block it sees one summary, or nothing.
There are three ways to choose the blocks: by a threshold (Sol-Attn, arXiv 2607.24027), a number of the best blocks (SLA), or
a number of the best cubes of a video with a learned share of the summaries (VSA of FastVideo). comfy-kitchen's `sol_attn`
computes all three.
"""

from dataclasses import dataclass

HEAD_SIZE = 128
"""Channels of a head in comfy-kitchen's kernels."""
KEYS, KEYS_AND_ROWS = "exact_kv", "exact_kv_and_rows"
"""Values of `sinks`."""
VIDEO, SOUND, REST = "video", "sound", "rest"
"""Kinds of segments: the latent's own video, its own audio, and everything else."""
Runs = tuple[tuple[int, str], ...]
"""(tokens, kind) of each segment of a sequence, in order. A segment is consecutive tokens of one image, video, audio or
text."""


@dataclass(frozen=True)
class SparseAttention:
    """How the layers of one model call attend."""

    tau: float = 1.3
    """A block of keys is seen exactly if its score is more than this number of standard deviations above the mean."""
    kept: float = 0.0
    """Fraction of the blocks of keys that are seen exactly, from 0 to 1. 0: `tau` decides."""
    extra_tokens: int = 0
    """Number of additional tokens that each query block sees exactly."""
    least_tokens: int = 0
    """Shorter sequences have dense attention."""
    full: tuple[str, ...] = ()
    """Blocks "<list>.<index>" whose attention is dense."""
    sinks: str = ""
    """KEYS: all queries see the tokens before the video exactly. KEYS_AND_ROWS: also, those of the video's own audio see all
    keys. Empty: neither."""
    cubes: bool = False
    """Whether blocks are cubes of the video (VSA)."""
    segments: Runs = ()
    """Segments of the joint sequence of ComfyUI's own class. Empty: unknown."""
    grid: tuple[int, ...] = ()
    """Number of the video's tokens along each axis, if there are `segments`."""

    @property
    def title(self) -> str:
        """Name in the report."""
        if self.cubes:
            return f"VSA, {self.kept:.1%} of the cubes"
        return f"SLA, {self.kept:.1%} of the blocks" if self.kept else f"Sol-Attn, tau {self.tau:g}"
