"""How a stage's tokens are cut over its sequence ranks."""

from dataclasses import dataclass

from .spans import Span, split, split_by_share


@dataclass(frozen=True)
class SequenceCut:
    """How a stage's text and image tokens are cut over its sequence ranks (patch x ring x ulysses, outer to inner).

    `shares`: of each patch rank, which is how a slower device gets a smaller band. `inner`: ring x ulysses. In naive
    patch mode (`repeat_text`) every band has the whole text, since there is no other way for it to know the prompt.
    """

    shares: tuple[float, ...]
    inner: int
    repeat_text: bool

    def image(self, tokens: Span) -> tuple[Span, ...]:
        """By sequence rank."""
        return tuple(part for band in split_by_share(tokens, self.shares) for part in split(band, self.inner))

    def text(self, tokens: int) -> tuple[Span, ...]:
        """By sequence rank, of `tokens` text tokens."""
        span = Span(0, tokens)
        bands = (span,) * len(self.shares) if self.repeat_text else split_by_share(span, self.shares)
        return tuple(part for band in bands for part in split(band, self.inner))
