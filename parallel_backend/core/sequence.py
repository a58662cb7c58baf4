"""How a stage's tokens are split over its sequence ranks (patch x ring x ulysses)."""

from dataclasses import dataclass

from .spans import Span, split, split_by_share
from .token_order import TokenOrder


@dataclass(frozen=True)
class SequenceCut:
    """Splits tokens over sequence ranks, which are numbered by patch, ring, ulysses, outer to inner."""

    shares: tuple[float, ...]
    """Each patch rank's share of the tokens. A slower device has a smaller share."""
    inner: int
    """Number of ring x ulysses ranks, which share the tokens of a patch evenly."""
    repeat_text: bool
    """Whether every patch rank has all text tokens, and only its own patch of the image. Naive patches exchange no keys, so
    a part of the text would miss the rest."""

    @property
    def size(self) -> int:
        """Number of sequence ranks."""
        return len(self.shares) * self.inner

    def parts(self, tokens: Span) -> tuple[Span, ...]:
        """Return each sequence rank's part of `tokens`. The parts do not overlap."""
        return tuple(part for band in split_by_share(tokens, self.shares) for part in split(band, self.inner))

    def image(self, tokens: Span) -> tuple[Span, ...]:
        """For each sequence rank, the image tokens among `tokens` that are sent to it. Outside of the blocks the class needs
        all tokens, unless patches are naive."""
        bands = split_by_share(tokens, self.shares) if self.repeat_text else (tokens,) * len(self.shares)
        return tuple(band for band in bands for _ in range(self.inner))

    def rows(self, order: TokenOrder, tokens: Span, companion_tokens: int) -> list[tuple[Span, Span]]:
        """For each sequence rank, two spans of a micro-step's input rows in the client: the rank's image tokens among
        `tokens`, and the companion's tokens, which follow all image tokens."""
        image = order.images(tokens)
        companion = Span(len(image), len(image) + companion_tokens)
        return [(order.images(part).shift(-image.start), companion) for part in self.image(tokens)]

    def gives_companion(self, index: int) -> bool:
        """Whether the output of sequence rank `index` has companion tokens. If text is repeated, only patch rank 0's has."""
        return not self.repeat_text or index < self.inner
