"""Finds out whether a band of the latent's tokens, run on its own, gives the same as the uncut model.

latent_tokens.py finds the tokens. A band's run is then compared with the uncut run, as a rank's is (comparison.py). Outside
of the band the latent has other random values, and outputs after the blocks are NaN. A second latent, such as a video's
audio, belongs to the first band and is outside of the others.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_backend.core.own_class import OwnBlock, OwnLatent
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.own_class.calls.patching import Patching
from parallel_backend.own_class.calls.residuals import AROUND, CONTROL
from parallel_backend.own_class.calls.tried_calls import Call, distance, drawn, smaller
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.band_tokens import ONE, BandTokens, Part, class_numbers
from parallel_backend.own_class.cuts.shared_outputs import SharedOutputs, WatchedOutputs, put_idle_modules
from parallel_backend.own_class.cuts.token_cut import HOST
from parallel_backend.own_class.trials.comparison import (
    ALL_LAYERS,
    TOLERANCE,
    ComparedRank,
    TensorRank,
    WholeRun,
    as_unproven,
    check_equal,
    close,
    why_not,
)
from parallel_backend.own_class.trials.latent_tokens import (
    find_latent,
    patching_of,
    reference_tokens,
    streams_entering,
)
from parallel_backend.own_class.trials.token_trial import WORDS, Runs

ROWS = 3, 3, 5
"""Maximum frames, rows and columns of tokens of the second call. They are odd, so that padding by the class shows."""
FEW_ROWS = 3, 3, 3
"""Like ROWS, for a call with which only the first and the last band are tried."""
OUTSIDE = 99
"""Seed of the random values outside of a band."""


def latent_of(
    model: nn.Module, blocks: Sequence[OwnBlock], actual: Call, times: Sequence[float], steady: bool = False
) -> OwnLatent:
    """Return where the latent's tokens are. Raises Unproven if bands give a wrong result for calls like `actual`, or at one
    of `times`.

    `blocks`: with the cut of their tokens. `steady`: an adapter's claim about the class's text, see OwnLatent.steady."""
    if len(actual.latents) > 2:
        raise Unproven("its call has more than two latents")
    runs = Runs(model, blocks)
    call = _even(runs, smaller(actual, *runs.sizes(actual)[0]))
    latent = find_latent(runs, call, steady)
    another = _odd(runs, actual, latent)
    latent = _of_both(latent, find_latent(runs, another, steady))
    calls = [drawn(call, 1), drawn(another, 2), *(drawn(call, 3, time) for time in times)]
    latent = replace(latent, pads=all(_pads(runs, latent, each) for each in calls[:2]))
    if not any(next(_bands(runs, latent, each), None) for each in calls):
        raise Unproven("its latent has a single row of tokens")
    if latent.steady:
        _check_words(runs, latent, calls[0])
    watched = WatchedOutputs(model, blocks)
    _check(runs, latent, calls[:1], watched)
    if not actual.named.get(CONTROL):
        lighter = replace(latent, shared=watched.shared(), idle=watched.idle())
        if not why_not(partial(_check, runs, lighter, calls[1:])):
            return lighter
    _check(runs, latent, calls[1:])
    return latent


def check_in_bands(
    model: nn.Module, blocks: Sequence[OwnBlock], latent: OwnLatent, actual: Call, time: float | None = None
) -> None:
    """Raise Unproven if bands give a wrong result for calls like `actual`, at timestep `time` if given. Tries the first and
    the last band."""
    runs = Runs(model, blocks)
    call = _odd(runs, actual, latent, FEW_ROWS)
    _of_both(latent, find_latent(runs, call, latent.steady))
    _check(runs, latent, [drawn(call, 1, time)], few=True)


def runs_of_bands(
    model: nn.Module, blocks: Sequence[OwnBlock], latent: OwnLatent, actual: Call
) -> Iterator[Callable[[TensorRank], list[torch.Tensor]]]:
    """Yield, for each band, a function that runs the band of a call like `actual` on a given tensor rank and returns the
    band's part of the output. TensorSharing calls it."""
    runs = Runs(model, blocks)
    call = drawn(_odd(runs, actual, latent), 1)
    whole, outside = runs.noted(call), drawn(call, OUTSIDE).x
    yield from (partial(band.output, whole, outside) for band in _bands(runs, latent, call))


def _even(runs: Runs, call: Call) -> Call:
    """Return the call with latent sizes that are multiples of large powers of two, and so of the usual patch sizes. A class
    may pad other sizes. If it does not run with these sizes, smaller powers are tried."""
    sides = call.latents[0].shape[2:]
    of_powers = (
        [1 << max(0, side.bit_length() - less) for side in sides] for less in range(2, max(3, max(sides).bit_length() + 1))
    )
    sizes = ([side - side % power for side, power in zip(sides, powers, strict=True)] for powers in of_powers)
    return _first_that_runs(runs, (smaller(call, each, WORDS) for each in sizes))


def _odd(runs: Runs, actual: Call, latent: OwnLatent, most: Sequence[int] = ROWS) -> Call:
    """Return a call with odd numbers of latent tokens along each axis and with less text. `most`: their first limits, which
    are raised until the class runs."""
    sides = actual.latents[0].shape[2:]
    by = latent.patch[-len(sides) :]
    limits = [most[-len(sides) :]]
    while max(limits[-1]) <= max(sides):
        limits.append([2 * rows - 1 for rows in limits[-1]])
    counts = ([max(1, min(*each)) for each in zip(rows, map(operator.floordiv, sides, by), strict=True)] for rows in limits)
    sizes = ([size * (count - 1 + count % 2) for size, count in zip(by, of_axes, strict=True)] for of_axes in counts)
    return _first_that_runs(runs, (smaller(actual, each, WORDS - 3) for each in sizes))


def _first_that_runs(runs: Runs, calls: Iterable[Call]) -> Call:
    """Return the first call with which the class runs and its streams enter the blocks. Raises Unproven if there is none."""
    for call in calls:
        if not (why := why_not(partial(streams_entering, runs, drawn(call, 1)))):
            return call
    raise Unproven(why)


def _of_both(latent: OwnLatent, another: OwnLatent) -> OwnLatent:
    """Return the OwnLatent for calls of both sizes. Raises Unproven if tokens are found elsewhere in the second."""
    if replace(another, words=latent.words, pads=latent.pads, shared=latent.shared, idle=latent.idle) != latent:
        raise Unproven("its latent's tokens are ordered differently in calls of two sizes")
    return replace(latent, words=latent.words or another.words)


def _check_words(runs: Runs, latent: OwnLatent, call: Call) -> None:
    """Raise Unproven if the text's keys and values change with the latent and the timestep."""
    another = drawn(call, OUTSIDE)
    first, second = (runs.noted(each) for each in (call, replace(call, x=another.x, timestep=another.timestep)))
    tokens = {stream: value.shape[1] for stream, value in streams_entering(runs, call).items()}
    band = next(_bands(runs, latent, call)).tokens
    for block, of_first, of_second in zip(runs.blocks, first.calls, second.calls, strict=True):
        for spec, one, other in zip(block.attention, of_first, of_second, strict=True):
            words = band.in_buffer(spec.keys, tokens, HOST)[: band.words(spec.keys, tokens)]
            both = zip(one.tensors[1:], other.tensors[1:], strict=True)
            if not all(torch.equal(a[:, words], b[:, words]) for a, b in both):
                raise Unproven(f"{block.name} has different keys for the text in another call")


def _pads(runs: Runs, latent: OwnLatent, call: Call) -> bool:
    """OwnLatent.pads: whether the class pads a latent circularly if its size is not a multiple of the patch size. It does if
    a latent and the same latent padded circularly by us give the same output."""
    sides, patching = call.latents[0].shape[2:], patching_of(latent, call)
    sizes = [size - (by > 1) for size, by in zip(sides, latent.patch[-len(sides) :], strict=True)]
    smaller_call = smaller(call, sizes, WORDS)
    first, *others = smaller_call.latents
    filled_up = patching.unpack(patching.pack(first), patching.whole(patching.grid(first.shape)))
    larger_call = smaller_call.with_latents([filled_up, *others])
    try:
        wholes = smaller_call.parts(runs.noted(smaller_call).result)
        out, *others = larger_call.parts(runs.noted(larger_call).result)
    except Unproven:
        return False
    parts = [patching.unpack(patching.pack(out), tuple(sizes)), *others]
    return all(
        part.shape == whole.shape and distance(part, whole) <= TOLERANCE for part, whole in zip(parts, wholes, strict=True)
    )


def _check(
    runs: Runs, latent: OwnLatent, calls: Sequence[Call], watched: WatchedOutputs | None = None, few: bool = False
) -> None:
    """Raise Unproven if a band of these calls gives a wrong result.

    `watched` sees the bands' runs; each band then also runs with NaN outside of it. `few`: try only the first and the last
    band of each call. Bands of the last call that have no text are also tried as patches of naive patches.
    """
    shared = SharedOutputs(runs.model, latent.shared)
    for call in calls:
        whole = runs.noted(call)
        outside = [drawn(call, OUTSIDE).x, *(() if watched is None else [torch.full_like(call.x, math.nan)])]
        if not isinstance(whole.result, torch.Tensor) or whole.result.shape[2:] != call.x.shape[2:]:
            raise Unproven("its output and its latent differ in size")
        bands = list(_bands(runs, latent, call))
        bands = bands[:: max(1, len(bands) - 1)] if few else bands
        for band in bands if call is calls[-1] else ():
            if not band.has_words:
                replace(band, alone=True).check(whole, outside[0])
        with put_idle_modules(runs.model, latent.idle, lambda: runs.tokens, math.nan), shared.of_call():
            for band, each in itertools.product(bands, outside):
                shared.begin()
                with nullcontext() if watched is None else watched.run(band.has_words):
                    band.check(whole, each, watched)


def _bands(runs: Runs, latent: OwnLatent, call: Call) -> Iterator["_Band"]:
    """The bands that a trial runs: the first, middle and last one of the call, cut by rows and then by frames.

    If the latent is `steady`, also the whole latent as one band whose text ran in an earlier call. An axis with fewer than
    two rows of tokens gives no bands.
    """
    references, patching = reference_tokens(runs, latent, call), patching_of(latent, call)
    grid = patching.grid(tuple(call.latents[0].shape))
    for along in ("rows", "frames")[: len(grid) - 1]:
        cut = patching.cut(along)
        if (rows := grid[cut.band_dim]) < 2:
            continue
        first, last = max(1, rows // 3), rows - max(1, rows // 3)
        spans = Span(0, first), Span(first, last), Span(last, rows)
        yield from (_Band(runs, latent, call, cut, span, references) for span in spans if len(span))
        if latent.steady:
            yield _Band(runs, latent, call, cut, Span(0, rows), references, words_have_run=True)


@dataclass(frozen=True)
class _Band:
    """A band: these `rows` (or frames) of tokens of the call's latent. The first band also has the second latent."""

    runs: Runs
    latent: OwnLatent
    call: Call
    patching: Patching
    rows: Span
    references: int
    """Number of reference tokens in the whole call."""
    alone: bool = False
    """Whether it is a patch of naive patches, which always has text and the second latent."""
    words_have_run: bool = False

    def check(self, whole: WholeRun, outside: torch.Tensor, watched: WatchedOutputs | None = None) -> None:
        """Raise Unproven if the band's run gives a wrong result. `outside`: latent values outside of the band."""
        with as_unproven("it does not run on a band of the latent", "in a band "):
            parts = self.output(whole, outside, ALL_LAYERS, watched)
        for part, own in zip(parts, self._own(whole.result), strict=True):
            check_equal("a band gives a different result", part, own)

    def output(
        self, whole: WholeRun, outside: torch.Tensor, tensor_rank: TensorRank, watched: WatchedOutputs | None = None
    ) -> list[torch.Tensor]:
        """Return the band's part of each latent's output. `outside`: latent values outside of the band."""
        x = outside.clone()
        for part, own in zip(self._own(x), self._own(self.call.x), strict=True):
            part.copy_(own)
        call, cut = replace(self.call, x=x, named=self._named()), self.tokens
        out = self.runs.run(call, _InBand(self.runs.blocks, whole, cut, tensor_rank, watched), tensor_rank)
        return self._own(out)

    def _named(self) -> Mapping[str, Any]:
        """Return the call's arguments. Residuals of a ControlNet are only the band's, in the order of bands."""
        if (control := self.call.named.get(CONTROL)) is None:
            return self.call.named
        rows = self.tokens.picture_numbers
        of_band = {
            kind: residuals if kind.startswith(AROUND) else [residual[:, rows] for residual in residuals]
            for kind, residuals in control.items()
        }
        return {**self.call.named, CONTROL: of_band}

    def _own(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the band's part of each latent in `x`, as views. `x` has the form of the call's latent."""
        latent, *companion = self.call.parts(x)
        by = self.patching.band_size
        band = self.patching.rows(latent, Span(by * self.rows.start, by * self.rows.stop))
        return [band, *(companion if self.alone or self.has_words else [])]

    @property
    def has_words(self) -> bool:
        return not self.rows.start and not self.words_have_run

    @property
    def tokens(self) -> BandTokens:
        """The band's tokens as ranks get them."""
        patching, shapes = self.patching, [tuple(each.shape) for each in self.call.latents]
        grid, second = patching.grid(shapes[0]), patching.companion_tokens(shapes)
        order = TokenOrder(math.prod(grid), patching.row_tokens(grid), self.references, patching.along)
        ahead = self.latent.tokens_ahead(self.call.named)
        band, numbers = order.of_rows(self.rows), class_numbers(order, grid)
        return BandTokens(self.latent, order, band, numbers, second, ahead, self.alone, self.words_have_run)


class _InBand(ComparedRank):
    """The run of a band in a trial. Keys and values of other bands come from the uncut run."""

    def __init__(
        self,
        blocks: Sequence[OwnBlock],
        whole: WholeRun,
        band: BandTokens,
        tensor_rank: TensorRank,
        watched: WatchedOutputs | None,
    ):
        super().__init__(blocks, 0, whole, tensor_rank)
        self.ranks, self.band, self._watched = ONE, band, watched

    def attend(self, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        out = super().attend(function, *args, **kwargs)
        if self._watched is not None and self.runs_block:
            streams = () if self.has_words or self._latest is None else self._latest.keys
            self._watched.attends(any(part.is_kept for stream in streams for part in self.band_parts(stream)))
        return out

    def has_rows_of(self, own: torch.Tensor, of_whole: torch.Tensor, streams: Sequence[int]) -> bool:
        """Whether `own` has the band's rows. Rows that stand in for missing text may have any value: their keys are not
        stored."""
        if not streams:
            return super().has_rows_of(own, of_whole, streams)
        parts = [part for stream in streams for part in self.band_parts(stream)]
        kept = torch.tensor([part.is_kept for part in parts for _ in range(len(part.place))])
        rows = self.rows(streams, self.index)
        return own.shape[1] == len(rows) and close(own[:, kept], of_whole[:, rows[kept]], of_whole)

    def band_parts(self, stream: int) -> list[Part]:
        """Return the band's tokens of a stream."""
        assert self.band is not None
        return self.band.parts(stream, self.tokens, ONE)[0]

    def gather(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        return value
