"""The cut of a stage's tokens over its sequence ranks (patch x ring x ulysses)."""

from dataclasses import dataclass

from .spans import Span, split, split_by_share
from .token_order import TokenOrder


@dataclass(frozen=True)
class SequenceCut:
    """Sequence ranks are numbered patch, ring, ulysses, outer to inner."""

    shares: tuple[float, ...]
    """Each patch rank's share of the tokens. A slower device has a smaller share."""
    inner: int
    """Number of ring x ulysses ranks, which share the tokens of a patch evenly."""
    repeat_text: bool
    """Every patch rank has all text tokens: naive patches exchange no keys, so a part of the text would miss the rest."""
    repeat_all: bool = False
    """Every rank has all tokens, as ComfyUI's own classes do outside of their blocks; of naive patches all of its patch."""

    @property
    def size(self) -> int:
        """Number of sequence ranks."""
        return len(self.shares) * self.inner

    def parts(self, tokens: Span) -> tuple[Span, ...]:
        """By sequence rank: its part of `tokens`. The parts do not overlap."""
        return tuple(part for band in split_by_share(tokens, self.shares) for part in split(band, self.inner))

    def image(self, tokens: Span) -> tuple[Span, ...]:
        """Each sequence rank's part of the image tokens `tokens`."""
        if not self.repeat_all:
            return self.parts(tokens)
        bands = split_by_share(tokens, self.shares) if self.repeat_text else (tokens,) * len(self.shares)
        return tuple(band for band in bands for _ in range(self.inner))

    def text(self, tokens: int) -> tuple[Span, ...]:
        """Each sequence rank's part of `tokens` text tokens."""
        span = Span(0, tokens)
        if self.repeat_all:
            return (span,) * self.size
        bands = (span,) * len(self.shares) if self.repeat_text else split_by_share(span, self.shares)
        return tuple(part for band in bands for part in split(band, self.inner))

    def rows(self, order: TokenOrder, tokens: Span, text: int, companion_tokens: int) -> list[tuple[Span, Span]]:
        """By sequence rank, two spans of a micro-step's input rows in the client: the rank's image tokens among `tokens`,
        and its part of the companion's tokens, which follow all image tokens.

        `text`: number of text tokens, whose first `companion_tokens` are the companion's.
        """
        image = order.images(tokens)
        return [
            (order.images(part).shift(-image.start), text_part.before(companion_tokens).shift(len(image)))
            for part, text_part in zip(self.image(tokens), self.text(text), strict=True)
        ]

    def gives_companion(self, index: int) -> bool:
        """Whether the output of sequence rank `index` has companion tokens. If text is repeated, only patch rank 0 has."""
        return not self.repeat_text or index < self.inner
