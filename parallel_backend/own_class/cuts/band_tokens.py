"""The tokens of a band in a class's streams, and the positions of their keys in the K/V buffer.

A band has the latent's tokens of its rows or frames, and a share of the references' tokens, as TokenOrder says. Other
tokens, such as text, are computed with the first band, or with every patch under naive patches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from parallel_backend.core.device_copies import to_device
from parallel_backend.core.own_class import COMPANION, LATENT, REFERENCES, WORDS, OwnLatent
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder, class_order
from parallel_backend.own_class.calls.unproven import Unproven

ONE = SequenceCut((1.0,), 1, repeat_text=False)
"""The cut for a single sequence rank, which has all tokens."""
Pick = Span | torch.Tensor
"""Rows of a stream: a span if they are consecutive, otherwise their numbers [n] int64."""
NONE = Span(0, 0)


class Run(NamedTuple):
    """Consecutive tokens of one kind in a stream."""

    kind: str
    """The kind of token: one of OwnLatent.layout."""
    rows: Span
    """The run's rows of the stream."""
    numbers: Span
    """Their numbers among the stream's other tokens, such as text. Empty for the latent's and references' tokens."""
    shared: Span
    """Numbers of the other tokens that sequence ranks split as one span. It contains `numbers`."""


class Part(NamedTuple):
    """A rank's tokens of a stream that are of one kind: either the latent's and references', or others such as text."""

    rows: Pick
    """The part's rows of the stream."""
    of_latent: bool
    place: Span
    """Positions in the order of bands, or among the stream's other tokens."""
    is_kept: bool
    """Whether its keys go into the K/V buffer. False: the row stands in for text, as a class cannot run without rows."""


@dataclass(frozen=True)
class BandTokens:
    """The tokens of one band. `band` may also be all of `order`: then it is the whole latent."""

    latent: OwnLatent
    order: TokenOrder
    """The order of image tokens for bands. It leaves out references that run with the first band."""
    band: Span
    """The band's positions in `order`."""
    numbers: torch.Tensor | None
    """[N] int64: position in `order` -> number of the token in the class's order, in which references come last. None: both
    orders are the same, and there are no references."""
    companion: int = 0
    """Number of tokens of the second latent (audio)."""
    ahead: int = 0
    """Number of reference tokens before the latent's, if there are others after the latent. Otherwise 0."""
    alone: bool = False
    """Whether this is a patch of naive patches, which sees no other patch. Then it has text tokens wherever it begins."""
    words_have_run: bool = False
    """Whether text tokens were computed in an earlier call: see OwnLatent.steady."""

    @property
    def has_words(self) -> bool:
        """Whether text tokens, or a second latent's tokens, are computed with this band."""
        return (self.alone or self.band.start == 0) and not self.words_have_run

    @property
    def pictures(self) -> Span:
        """Positions of the band's latent tokens in the order of bands, counted without references."""
        return self.order.images(self.band)

    @property
    def picture_numbers(self) -> slice | torch.Tensor:
        """Numbers of the band's latent tokens in the class's order: a slice, or int64."""
        if self.numbers is None:
            return self.pictures.slice
        numbers = self.numbers[self.band.slice]
        return numbers[to_device(self.order.picture_rows(self.band), numbers.device)]

    def others(self, stream: int, tokens: int) -> int:
        """Return the number of a stream's tokens that belong neither to the latent nor to references."""
        return tokens - (self.order.tokens if stream in self.latent.streams else 0)

    def parts(self, stream: int, tokens: Mapping[int, int], ranks: SequenceCut) -> list[list[Part]]:
        """Return each sequence rank's parts of a stream. `tokens`: number of tokens by stream."""
        others, has_words = self.others(stream, tokens[stream]), self.has_words
        runs = self._runs(stream, tokens)
        starts = {run.kind: run.rows.start for run in runs}  # of references those behind the latent, if on both sides
        found: list[list[Part]] = []
        for rank, own in enumerate(ranks.parts(self.band)):
            parts = []
            for run in runs:
                if run.kind == LATENT:
                    parts.append(Part(self._rows(own, starts), True, own, True))
                elif run.kind != REFERENCES:
                    share = ranks.parts(run.shared)[rank] if has_words else _stand_in(others, rank)
                    share = share.common(run.numbers)
                    rows = share.shift(run.rows.start - run.numbers.start)
                    parts.append(Part(rows, False, share, has_words))
            found.append([part for part in parts if len(part.place)] or parts[:1])
        return found

    def _rows(self, own: Span, starts: Mapping[str, int]) -> Pick:
        """Return the rows of a stream at the positions `own`. `starts`: kind of token -> its first row."""
        if self.numbers is None or self.latent.beside:  # rows of both are in the order of bands
            return own.shift(starts[LATENT])
        numbers, image = self.numbers[own.slice], self.order.image
        rows = numbers + starts[LATENT]
        if REFERENCES not in starts:
            return rows
        rows = torch.where(numbers < image, rows, numbers + (starts[REFERENCES] - image - self.ahead))
        return (
            torch.where((numbers >= image) & (numbers < image + self.ahead), numbers - image, rows) if self.ahead else rows
        )

    def _runs(self, stream: int, tokens: Mapping[int, int]) -> list[Run]:
        """Return the stream's tokens as runs of one kind, in the class's order."""
        others = self.others(stream, tokens[stream])
        if stream not in self.latent.streams:
            return [_words(Span(0, others))]
        if not self.latent.layout:
            behind = self._behind(stream, tokens)
            image = Span(0, self.order.image).shift(others - behind)
            last = Span(others - behind, others)
            return [
                _words(Span(0, others - behind)),
                Run(LATENT, image, NONE, NONE),
                Run(WORDS, last.shift(self.order.image), last, last),
            ]
        # The second latent's tokens come before the words in what ranks share out.
        numbers = {COMPANION: Span(0, self.companion), WORDS: Span(self.companion, others)}
        lengths = {LATENT: self.order.image} | {kind: len(each) for kind, each in numbers.items()}
        of_references = [self.order.references - self.ahead]
        if self.latent.layout.count(REFERENCES) > 1:
            of_references.insert(0, self.ahead)
        left = iter(of_references)
        counts = [next(left) if kind == REFERENCES else lengths[kind] for kind in self.latent.layout]
        if others < self.companion or not all(each > 0 for each in of_references) or sum(counts) != tokens[stream]:
            raise Unproven("its tokens differ from those in the trial")
        runs, row = [], 0
        for kind, count in zip(self.latent.layout, counts, strict=True):
            rows = Span(row, row + count)
            runs.append(Run(kind, rows, numbers.get(kind, NONE), Span(0, others)))
            row = rows.stop
        return runs

    def _behind(self, stream: int, tokens: Mapping[int, int]) -> int:
        """Return the number of other tokens that follow the latent's in one of the latent's streams."""
        others = self.others(stream, tokens[stream])
        if stream == self.latent.stream:
            return 0 if self.latent.before else others
        entry = next(entry for entry in self.latent.again if entry.stream == stream)
        if entry.behind:
            return self.others(self.latent.stream, tokens[self.latent.stream])
        return 0 if entry.before else others

    def pieces(
        self, streams: Sequence[int], tokens: Mapping[int, int], ranks: SequenceCut, some: range
    ) -> list[tuple[Span, Span]]:
        """Return pairs (rows of keys, their positions in the K/V buffer). Rows count the keys of the ranks `some`, rank by
        rank. The buffer has the other tokens first, stream by stream, and then the latent's in the order of bands."""
        found, row, words = [], 0, self.words(streams, tokens)
        for rank in some:
            offset = 0
            for stream in streams:
                for part in self.parts(stream, tokens, ranks)[rank]:
                    count = len(part.place)
                    if count and part.is_kept:
                        found.append((Span(row, row + count), part.place.shift(words if part.of_latent else offset)))
                    row += count
                offset += self.others(stream, tokens[stream])
        return found

    def words(self, streams: Sequence[int], tokens: Mapping[int, int]) -> int:
        """Number of these streams' tokens that belong neither to the latent nor to references. `tokens`: by stream."""
        return sum(self.others(stream, tokens[stream]) for stream in streams)

    def in_buffer(self, streams: Sequence[int], tokens: Mapping[int, int], device: torch.device) -> torch.Tensor:
        """[n] int64: numbers of these streams' tokens in the buffer's order. Streams are counted one after the other."""
        words: list[torch.Tensor] = []
        latents: list[torch.Tensor] = []
        start = 0
        whole = replace(self, band=self.order.span, words_have_run=False)
        for stream in streams:
            for part in sorted(whole.parts(stream, tokens, ONE)[0], key=lambda part: part.place.start):
                (latents if part.of_latent else words).append(numbers(part.rows, device) + start)
            start += tokens[stream]
        return torch.cat([*words, *latents])


def class_numbers(order: TokenOrder, grid: tuple[int, ...]) -> torch.Tensor | None:
    """`BandTokens.numbers` for a latent with these tokens, in host memory."""
    if order.references:
        return order.places_in_class(grid, order.span)
    return class_order(grid, order.along)


def shift(pick: Pick, by: int) -> Pick:
    """Return the rows, each moved by `by`."""
    return pick.shift(by) if isinstance(pick, Span) else pick + by


def numbers(pick: Pick, device: torch.device) -> torch.Tensor:
    """Return the rows as numbers [n] int64 on the device."""
    return torch.arange(pick.start, pick.stop, device=device) if isinstance(pick, Span) else pick.to(device)


def _words(rows: Span) -> Run:
    return Run(WORDS, rows, rows, rows)


def _stand_in(others: int, rank: int) -> Span:
    row = min(rank, others - 1)
    return Span(row, row + 1) if others else NONE
