"""The tokens of a band in a class's streams, and where their keys are in the K/V buffer.

A band has the latent's tokens of its rows or frames. Other tokens, such as words, run with the first band.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from parallel_backend.core.own_class import OwnLatent
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span

ONE = SequenceCut((1.0,), 1, repeat_text=False)
"""A sequence rank alone."""
Pick = Span | torch.Tensor
"""Rows of a stream: those that follow each other, or their numbers [n] int64."""


class Part(NamedTuple):
    """A rank's tokens that are the latent's, or that are not."""

    rows: Pick
    """Of the stream."""
    of_latent: bool
    place: Span
    """Among the latent's tokens, in the order of bands, or among the stream's other ones."""
    is_kept: bool
    """Its keys are. False: a row that runs in place of words, since classes cannot tell the sizes of a tensor of no rows."""


@dataclass(frozen=True)
class BandTokens:
    """A band, or the whole latent if `band` has all of its `count` tokens."""

    latent: OwnLatent
    count: int
    band: Span
    """In the order of bands."""
    order: torch.Tensor | None
    """Place of a token of the latent in the order of bands -> its number in the class's. None: they are the same."""

    def others(self, stream: int, tokens: int) -> int:
        """How many of a stream's tokens are not the latent's."""
        return tokens - (self.count if stream in self.latent.streams else 0)

    def parts(self, stream: int, tokens: Mapping[int, int], ranks: SequenceCut) -> list[list[Part]]:
        """By sequence rank: its parts of a stream, in the class's order. `tokens`: of each stream."""
        others, is_latent = self.others(stream, tokens[stream]), stream in self.latent.streams
        before = others - (self._behind(stream, tokens) if is_latent else 0)
        found: list[list[Part]] = []
        with_words = self.band.start == 0
        for rank, own in enumerate(ranks.parts(self.band)):
            if with_words:
                shares = [ranks.parts(each)[rank] for each in (Span(0, before), Span(before, others))]
            else:
                stand_in = _stand_in(others, rank)
                shares = [Span(0, 0), stand_in] if stand_in.start >= before else [stand_in, Span(before, before)]
            parts = [Part(share, False, share, with_words) for share in shares]
            if is_latent:
                rows: Pick = own if self.order is None else self.order[own.slice]
                behind = parts[1]._replace(rows=shares[1].shift(self.count))
                parts[1:] = [Part(shift(rows, before), True, own, True), behind]
            found.append([part for part in parts if len(part.place)] or parts[:1])
        return found

    def _behind(self, stream: int, tokens: Mapping[int, int]) -> int:
        """Other tokens of one of the latent's streams that come behind the latent's."""
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
        """(rows of the keys of `some` ranks, rank by rank; their positions in the buffer). In the buffer the other tokens
        come first, stream by stream, and then the latent's in the order of bands."""
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
        """Tokens of these streams that are not the latent's."""
        return sum(self.others(stream, tokens[stream]) for stream in streams)

    def in_buffer(self, streams: Sequence[int], tokens: Mapping[int, int], device: torch.device) -> torch.Tensor:
        """[n] int64: numbers of the tokens of these streams, one behind the other, in the order of the buffer."""
        words: list[torch.Tensor] = []
        latents: list[torch.Tensor] = []
        start = 0
        whole = replace(self, band=Span(0, self.count))
        for stream in streams:
            for part in whole.parts(stream, tokens, ONE)[0]:
                (latents if part.of_latent else words).append(numbers(part.rows, device) + start)
            start += tokens[stream]
        return torch.cat([*words, *latents])


def shift(pick: Pick, by: int) -> Pick:
    """The rows `by` further on."""
    return pick.shift(by) if isinstance(pick, Span) else pick + by


def numbers(pick: Pick, device: torch.device) -> torch.Tensor:
    """[n] int64"""
    return torch.arange(pick.start, pick.stop, device=device) if isinstance(pick, Span) else pick.to(device)


def _stand_in(others: int, rank: int) -> Span:
    row = min(rank, others - 1)
    return Span(row, row + 1) if others else Span(0, 0)
