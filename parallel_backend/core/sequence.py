"""The cut of a stage's tokens over its sequence ranks (patch x ring x ulysses)."""

from dataclasses import dataclass

from .spans import Span, split, split_by_share
from .token_order import TokenOrder


@dataclass(frozen=True)
class SequenceCut:
    """Sequence ranks are numbered patch, ring, ulysses, outer to inner."""

    shares: tuple[float, ...]
    """Share of the tokens by patch rank. A slower device has a smaller share."""
    inner: int
    """Ring x ulysses ranks, which share a patch rank's tokens evenly."""
    repeat_text: bool
    """Every patch rank has the whole text. In naive patch mode it has no other way to know the prompt."""

    def image(self, tokens: Span) -> tuple[Span, ...]:
        """Each sequence rank's part of the image tokens `tokens`."""
        return tuple(part for band in split_by_share(tokens, self.shares) for part in split(band, self.inner))

    def text(self, tokens: int) -> tuple[Span, ...]:
        """Each sequence rank's part of `tokens` text tokens."""
        span = Span(0, tokens)
        bands = (span,) * len(self.shares) if self.repeat_text else split_by_share(span, self.shares)
        return tuple(part for band in bands for part in split(band, self.inner))

    def rows(self, order: TokenOrder, tokens: Span, text: int, companion_tokens: int) -> list[tuple[Span, Span]]:
        """By sequence rank, its rows of a micro-step's latents as the client has them: the picture's among `tokens`, and
        behind all those, of its companion, the `companion_tokens` first of `text` text tokens."""
        image = order.images(tokens)
        return [
            (order.images(own).shift(-image.start), text_span.before(companion_tokens).shift(len(image)))
            for own, text_span in zip(self.image(tokens), self.text(text), strict=True)
        ]

    def gives_companion(self, index: int) -> bool:
        """Whether the output of sequence rank `index` has tokens of the companion latent: of repeated ones the first patch
        rank's are taken."""
        return not self.repeat_text or index < self.inner
