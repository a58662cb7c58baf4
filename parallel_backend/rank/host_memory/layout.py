"""Layout of a rank's blocks in its host memory."""

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from parallel_backend.core.spans import Span

DIGEST_BYTES = 8
PAGE = 1 << 16
"""Each block begins at a multiple of this many bytes, so that it can be page-locked separately on every system."""


@dataclass(frozen=True)
class Layout:
    """Where blocks are in memory. `spans`: block -> its bytes. Before them are a digest and a byte of state for each block,
    at the position that `numbers` gives."""

    spans: Mapping[str, Span]
    numbers: Mapping[str, int]
    nbytes: int

    @staticmethod
    def of(sizes: Mapping[str, int]) -> "Layout":
        """Return the layout for blocks with these `sizes` in bytes. Ranks that share need the same order."""
        steps = [-(-nbytes // PAGE) * PAGE for nbytes in (DIGEST_BYTES + len(sizes), *sizes.values())]
        starts = list(itertools.accumulate(steps))
        spans = {name: Span(start, start + size) for (name, size), start in zip(sizes.items(), starts, strict=False)}
        return Layout(spans, {name: number for number, name in enumerate(sizes)}, starts[-1])

    @property
    def digest(self) -> int:
        """63 bits that are equal for equal blocks in equal order."""
        text = "\n".join(f"{name} {span.start} {span.stop}" for name, span in self.spans.items())
        return digest(text)


def digest(text: str) -> int:
    """63 bits of a text's hash; they fit into an int64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
