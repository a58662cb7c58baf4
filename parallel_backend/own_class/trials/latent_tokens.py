"""Finds a latent's tokens: the stream in which they enter a class's blocks, and their rows in that stream.

Each run of the prologue (the code before the blocks) changes one row, column or frame of the latent. In these runs, lists of
blocks after which tokens are gathered, such as refiners, return their tokens unchanged.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallel_backend.core.own_class import COMPANION, LATENT, REFERENCES, WORDS, OwnBlock, OwnEntry, OwnLatent
from parallel_backend.own_class.calls.block_arguments import Arguments, in_rows, tensor_places
from parallel_backend.own_class.calls.patching import Companion, Patching
from parallel_backend.own_class.calls.tried_calls import Call, drawn, words_of
from parallel_backend.own_class.calls.unproven import Unproven, first_line
from parallel_backend.own_class.cuts.token_cut import entries_of
from parallel_backend.own_class.trials.comparison import WholeRun
from parallel_backend.own_class.trials.token_trial import Runs

MIXED = "its latent's tokens are not equal parts in raster order, or are mixed before its blocks"
OTHER_IMAGES = 2
"""Seed of the values of other images."""


class _HasEntered(Exception):
    """Not an error: ends a run once all streams are known."""


class _Prologue(WholeRun):
    """Records the streams where they enter, then ends the run. Blocks after which tokens are gathered return them
    unchanged."""

    def __init__(self, blocks: Sequence[OwnBlock]):
        super().__init__(blocks)
        self.streams: dict[int, torch.Tensor] = {}
        self._coming_streams = {cut.streams[0] for block in blocks for cut in block.slices if cut.enters}

    def enter(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        leaves = pytree.tree_leaves((args, kwargs))
        places = tensor_places(leaves)
        for cut in self.blocks[number].slices:
            if cut.enters:
                self.streams.setdefault(cut.streams[0], in_rows(leaves[places[cut.tensor]], cut).clone())
        if self._coming_streams <= set(self.streams):
            raise _HasEntered
        return super().enter(number, args, kwargs)

    def leaves(self, number: int) -> bool:
        return bool(self.blocks[number].leaving)

    def leave(self, out: Any, is_known: bool = True) -> Any:
        values = (out,) if isinstance(out, torch.Tensor) else out
        entered = [
            torch.cat([self.streams[stream] for stream in streams], dim=1) if streams else value
            for value, streams in zip(values, self.block.leaving, strict=True)
        ]
        if any(value is not None and value.shape != each.shape for value, each in zip(values, entered, strict=True)):
            raise Unproven("a list of blocks returns tokens in another shape than it gets")
        return entered[0] if isinstance(out, torch.Tensor) else tuple(entered)


def find_latent(runs: Runs, call: Call, steady: bool = False) -> OwnLatent:
    """Return where the tokens of the call's latent are. `steady`: see OwnLatent; if true, references count as text. Raises
    Unproven if they are not in raster order in one stream, each time that tokens enter the blocks."""
    search = _LatentSearch(runs, call)
    (found, *more) = search.rasters()
    if found.patch[-1] != found.patch[-2]:
        raise Unproven(f"a token has {found.patch[-2]} rows and {found.patch[-1]} columns of its latent")
    again = []
    for each in more:
        behind = found.start == 0 and each.start > 0 and each.behind == found.behind
        again.append(OwnEntry(each.stream, each.start > 0, behind))
    pattern, companions = "", Changed({})
    if len(call.latents) > 1:
        pattern, companions = search.companion(found)
    hints = [] if companions else search.hints(found)
    again += [OwnEntry(stream, False, False) for stream in hints]
    kinds = [] if more or steady else search.kinds(found, companions)
    layout, references = tuple(kind for kind, _ in itertools.groupby(kinds)), kinds.count(REFERENCES)
    frames = found.patch[0] if len(found.patch) == 3 else 1
    others = sum(value.shape[1] for value in search.first.values()) - found.count * (1 + len(again)) - references
    if found.beside and not layout:
        raise Unproven("tokens that are not references are between its latent's rows")
    before = bool(set(layout[: layout.index(LATENT)]) - {REFERENCES}) if layout else found.start > 0
    if not layout and found.start and found.behind:
        raise Unproven("other tokens come both before and after its latent's")
    patch = frames, found.patch[-2], found.patch[-1]
    words = others > sum(len(rows) for rows in companions.values())
    latent = OwnLatent(found.stream, before, patch, words, pads=False, again=tuple(again), companion=pattern, layout=layout)
    ahead = search.ahead(latent, kinds) if layout.count(REFERENCES) > 1 else ""
    return replace(latent, beside=found.beside > 0, ahead=ahead, steady=steady and words and not pattern)


Changed = dict[int, tuple[int, ...]]
"""Number of a stream -> the rows that a change of the latent changes. Unchanged streams are missing."""


@dataclass(frozen=True)
class _Raster:
    """The latent's tokens in a stream, in raster order.

    `start`, `behind`: numbers of other tokens before and after them. `patch`: sizes of the part of the latent that a token
    has. `grid`: number of tokens along each axis. `beside`: number of other tokens after each row of an image's tokens,
    which `behind` does not count.
    """

    stream: int
    start: int
    behind: int
    patch: tuple[int, ...]
    grid: tuple[int, ...]
    beside: int

    @property
    def count(self) -> int:
        """Number of the latent's tokens."""
        return math.prod(self.grid)

    @property
    def rows(self) -> list[int]:
        """Rows of the latent's tokens in the stream."""
        return self._numbers().flatten().tolist()

    def _numbers(self) -> torch.Tensor:
        """[*grid] int64: row of each of the latent's tokens."""
        *lines, columns = self.grid
        along = torch.arange(math.prod(lines))[:, None] * (columns + self.beside) + torch.arange(columns)
        return along.view(self.grid) + self.start

    @staticmethod
    def of(changed: Sequence[Sequence[Changed]], first: Mapping[int, torch.Tensor], streams: set[int]) -> "_Raster":
        """Return the raster in these streams. `changed`: for each axis of the latent and each index, the rows that its
        values change. Raises Unproven if the rows are not a raster."""
        found = [[_only(rows, streams) for rows in of_axis] for of_axis in changed]
        if len(among := {stream for of_axis in found for stream, _ in of_axis}) != 1:
            raise Unproven("tokens of its latent are in several streams")
        (stream,), by_axis = among, [[rows for _, rows in of_axis] for of_axis in found]
        patch = tuple(len(list(next(itertools.groupby(of_axis))[1])) for of_axis in by_axis)
        if any(len(of_axis) % by for of_axis, by in zip(by_axis, patch, strict=True)):
            raise Unproven(MIXED)
        grid = tuple(len(of_axis) // by for of_axis, by in zip(by_axis, patch, strict=True))
        start = min(by_axis[0][0])
        lines = [min(rows) for rows in by_axis[-2][:: patch[-2]]]
        beside = lines[1] - lines[0] - grid[-1] if len(grid) == 2 and len(lines) > 1 else 0
        tokens = math.prod(grid[:-1]) * (grid[-1] + beside)
        raster = _Raster(stream, start, first[stream].shape[1] - start - tokens, patch, grid, beside)
        numbers = raster._numbers()
        for axis, of_axis in enumerate(by_axis):
            for index, rows in enumerate(of_axis):
                if beside < 0 or sorted(numbers.select(axis, index // patch[axis]).flatten().tolist()) != list(rows):
                    raise Unproven(MIXED)
        return raster


def _only(changed: Changed, streams: set[int]) -> tuple[int, tuple[int, ...]]:
    """Return (stream, rows) if exactly one of these streams is changed. Otherwise raises Unproven."""
    among = [stream for stream in changed if stream in streams]
    if len(among) != 1:
        raise Unproven("tokens of its latent are in several streams" if among else "a part of its latent is not used")
    return among[0], changed[among[0]]


class _LatentSearch:
    """Runs of the prologue: with a call of random values, and with changes of that call."""

    def __init__(self, runs: Runs, call: Call):
        self._runs, self._call = runs, drawn(call, 1)
        self.first = streams_entering(runs, self._call)
        """The streams of the unchanged call."""

    def rasters(self) -> list[_Raster]:
        """Return the latent's tokens, for each time that tokens enter the blocks. Raises Unproven if they are not a regular
        grid."""
        sides = self._call.latents[0].shape
        changed = [[self._by_latent(0, axis, index) for index in range(sides[axis])] for axis in range(2, len(sides))]
        return [_Raster.of(changed, self.first, streams) for streams in entries_of(self._runs.blocks)]

    def companion(self, found: _Raster) -> tuple[str, Changed]:
        """Return (Companion.pattern from the second latent to its tokens, stream -> rows of those tokens). `found`: the
        first latent's.

        Raises Unproven if the latents share a token, or if the second one's tokens do not consist of whole axes. The pattern
        only gives the number of tokens. The later trial of bands proves that these tokens belong to the second latent.
        """
        sizes = self._call.latents[1].shape
        stream, rows = _only(self._by_latent(1, 0, 0), set(self.first))
        if stream == found.stream and set(found.rows) & set(rows):
            raise Unproven("its second latent is mixed into the first latent's tokens before its blocks")
        of_channels = [axis for axis in range(1, len(sizes)) if rows in self._by_latent(1, axis, 0).values()]
        of_tokens = [axis for axis in range(1, len(sizes)) if axis not in of_channels]
        if not of_tokens or math.prod(sizes[axis] for axis in of_tokens) != len(rows):
            raise Unproven("its second latent's tokens are mixed before its blocks")
        names, tokens, channels = (
            " ".join(f"a{axis}" for axis in axes) for axes in (range(1, len(sizes)), of_tokens, of_channels)
        )
        return f"b {names} -> b ({tokens}) ({channels})", {stream: rows}

    def hints(self, found: _Raster) -> list[int]:
        """Return other streams that have one token for each of the latent's tokens, and depend on images in the arguments.
        Bands split them like the latent's."""
        changed, all_rows = self._by_images(), tuple(range(found.count))
        beside = (stream for stream in entries_of(self._runs.blocks)[0] if stream != found.stream)
        return [each for each in beside if self.first[each].shape[1] == found.count and changed.get(each) == all_rows]

    def kinds(self, found: _Raster, companions: Changed) -> list[str]:
        """Return the kind of each token in the latent's stream, see OwnLatent.layout. References are tokens that images in
        the arguments change. Empty: there are no references, tokens of a kind are apart, or a token's kind is unknown."""
        kinds = [WORDS] * self.first[found.stream].shape[1]
        images = self._by_images().get(found.stream, ())
        for kind, rows in ((REFERENCES, images), (COMPANION, companions.get(found.stream, ())), (LATENT, found.rows)):
            for row in rows:
                kinds[row] = kind
        if found.beside:
            lines, columns = found.grid
            stop, others = found.start + lines * (columns + found.beside), [REFERENCES] * found.beside
            if kinds[found.start : stop] != ([LATENT] * columns + others) * lines or REFERENCES in kinds[stop:]:
                return []
            kinds[found.start : stop] = [LATENT] * found.count + others * lines
        is_known = kinds.count(WORDS) in (0, words_of(self._call)) and REFERENCES in kinds
        order = [kind for kind, _ in itertools.groupby(kinds)]
        is_around = order == [REFERENCES, LATENT, REFERENCES] and not found.beside
        return kinds if is_known and (is_around or len(order) == len(set(kinds))) else []

    def ahead(self, latent: OwnLatent, kinds: Sequence[str]) -> str:
        """OwnLatent.ahead. Raises Unproven if no argument has exactly the references before the latent."""
        before = tuple(range(kinds.index(LATENT)))
        for name, value in self._call.named.items():
            if isinstance(value, torch.Tensor) and value.ndim > 3:
                tokens = replace(latent, ahead=name).tokens_ahead(self._call.named)
                if self._by_images({name}).get(latent.stream) == before and tokens == len(before):
                    return name
        raise Unproven("references before and after its latent are not separate arguments")

    def _by_latent(self, part: int, axis: int, index: int) -> Changed:
        """Return the rows that change with latent number `part` at this index of an axis."""
        x = self._call.x.clone()
        self._call.parts(x)[part].select(axis, index).add_(1)
        return self._changed(replace(self._call, x=x))

    def _by_images(self, some: Collection[str] | None = None) -> Changed:
        """The rows that change with images, which are tensors with at least four axes. `some`: only in these arguments."""

        def other(own: Any, another: Any) -> Any:
            return another if torch.is_tensor(own) and own.ndim > 3 else own

        named = dict(self._call.named)
        for name, others in drawn(self._call, OTHER_IMAGES).named.items():
            if some is None or name in some:
                named[name] = pytree.tree_map(
                    lambda a, b: b if torch.is_tensor(a) and a.ndim > 3 else a, named[name], others
                )
        return self._changed(replace(self._call, named=named))

    def _changed(self, call: Call) -> Changed:
        """Return the rows that differ between this call and the unchanged one."""
        now = streams_entering(self._runs, call)
        if any(value.shape != self.first[stream].shape for stream, value in now.items()):
            raise Unproven("its tokens differ for two latents of the same size")
        differ = {stream: (value - self.first[stream]).abs().amax(dim=(0, 2)) for stream, value in now.items()}
        rows = {stream: tuple(each.nonzero()[:, 0].tolist()) for stream, each in differ.items()}
        return {stream: of_stream for stream, of_stream in rows.items() if of_stream}


def patching_of(latent: OwnLatent, call: Call) -> Patching:
    """Return how the call's latents become tokens."""
    (first, *others), (frames, side, _) = call.latents, latent.patch
    companion = Companion(latent.companion, tuple(others[0].shape[1:])) if others else None
    return Patching(side=side, frames=frames, video=first.ndim == 5, companion=companion)


def reference_tokens(runs: Runs, latent: OwnLatent, call: Call) -> int:
    """Return the number of the call's reference tokens if bands split them; otherwise 0."""
    if not latent.layout:
        return 0
    patching, shapes = patching_of(latent, call), [tuple(each.shape) for each in call.latents]
    image, companion = math.prod(patching.grid(shapes[0])), patching.companion_tokens(shapes)
    others = {WORDS: words_of(call), COMPANION: companion, LATENT: image}
    tokens = streams_entering(runs, call)[latent.stream].shape[1]
    return tokens - sum(count for kind, count in others.items() if kind in latent.layout)


def streams_entering(runs: Runs, call: Call) -> dict[int, torch.Tensor]:
    """Return the tokens of each stream where it enters the blocks. Raises Unproven if the class does not run."""
    prologue = _Prologue(runs.blocks)
    try:
        runs.run(call, prologue)
    except _HasEntered:
        return prologue.streams
    except Exception as error:  # of any kind: its code is not known
        raise Unproven(f"it failed in the trial of patches ({first_line(error)})") from error
    raise Unproven("some of its streams of tokens never enter its blocks")
