"""Finds how a class's tokens can be split over sequence ranks, and whether each rank then computes what the uncut model
does.

The uncut run records the arguments, attention calls and outputs of its blocks. Then ranks run one after the other in one
process. A rank's queries, keys and values must be rows of the recorded ones, and so must the last block's outputs.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from parallel_backend.core.own_class import OwnAttention, OwnBlock, OwnSlice
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.block_arguments import Arguments, by_place, tensor_places, token_axes, token_count
from parallel_backend.own_class.calls.tried_calls import Call, drawn, smaller, words_of
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.attention_calls import attention_call, shares_keys
from parallel_backend.own_class.cuts.stages import StageBlocks
from parallel_backend.own_class.cuts.token_cut import TokenCut
from parallel_backend.own_class.trials.comparison import (
    ALL_LAYERS,
    RANKS,
    ComparedRank,
    TensorRank,
    WholeRun,
    as_unproven,
    check_equal,
    found_or_why,
)

HIDDEN = -1e4
"""A mask adds at most this where a key is hidden."""


def without_token_cut(blocks: Sequence[OwnBlock]) -> list[OwnBlock]:
    """Return the blocks without the cut of their tokens."""
    return [replace(block, slices=(), attention=(), leaving=(), placed=()) for block in blocks]


def are_cut(blocks: Sequence[OwnBlock]) -> bool:
    """Whether the blocks have a cut of their tokens."""
    return any(block.slices for block in blocks)


class Learning(ComparedRank):
    """The run of the last rank. It finds how tokens are cut, and writes that into `blocks`.

    `another`: an uncut run with other numbers of tokens. `order`: the streams' order in tables of all tokens. `ends`:
    numbers of the blocks after which tokens are gathered. `placed`: whether all other blocks have OwnBlock.placed. `local`:
    see OwnBlock.
    """

    def __init__(
        self,
        blocks: Sequence[OwnBlock],
        whole: WholeRun,
        another: WholeRun,
        order: Sequence[int],
        local: tuple[int, ...],
        ends: Sequence[int],
        placed: bool,
    ):
        *others, last = without_token_cut(blocks)
        super().__init__([*others, replace(last, local=local)], RANKS - 1, whole)
        self._another, self._order, self._ends, self._placed = another, order, ends, placed
        self._of_another: dict[int, int] = {}  # tokens of each stream there
        self._gone = 0  # streams that have left
        self._entered: dict[tuple[Any, Any], OwnSlice] = {}  # by its shapes in both: the last stream of them

    def begin(self) -> None:
        super().begin()
        self._of_another, self._entered, self._gone = {}, {}, 0

    def enter(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        self.number = number
        block, given = self.blocks[number], by_place(args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaves[at] for at in tensor_places(leaves)]
        shapes, others = self._noted.shapes[number], self._another.shapes[number]
        if not len(tensors) == len(shapes) == len(others):
            raise Unproven(f"{block.name} gets different arguments in calls of two sizes")
        of_streams = {id(given[place]) for place in block.returns if place}
        entering: list[OwnSlice] = []
        coming_back: list[OwnSlice] = []
        tables: list[int] = []
        for at, (tensor, shape, other) in enumerate(zip(tensors, shapes, others, strict=True)):
            if tensor.shape != shape:
                continue  # made of tokens that are cut already
            if id(tensor) in of_streams:
                of_streams.discard(id(tensor))
                if self._placed and (again := self._table(at, shape, other, self._present)):
                    coming_back.append(replace(again, enters=True))
                    continue
                stream = len(self.tokens) + len(entering)
                axis, axes = token_axes(shape, other, len(self._noted.result))
                entering.append(OwnSlice(at, axis, (stream,), True, axes))
                self._entered[shape, other] = entering[-1]
                self._of_another[stream] = token_count(other, entering[-1])
            else:
                tables.append(at)
        known = self._present | {cut.streams[0]: token_count(shapes[cut.tensor], cut) for cut in entering}
        cuts = entering + coming_back + [cut for at in tables if (cut := self._table(at, shapes[at], others[at], known))]
        self.blocks[number] = replace(block, slices=tuple(cuts))
        return super().enter(number, args, kwargs)

    def _table(self, at: int, shape: torch.Size, other: torch.Size, known: Mapping[int, int]) -> OwnSlice | None:
        """Return the cut of a tensor with a row for each token of one stream, or of all streams in order. None: it has no
        such rows."""
        if (like := self._entered.get((shape, other))) is not None:
            return replace(like, tensor=at, enters=False)
        whole = tuple(stream for order in self._order if (stream := self._gone + order) in known)
        for streams in dict.fromkeys([*((stream,) for stream in known), whole]):
            sizes = sum(known[stream] for stream in streams), sum(self._of_another[stream] for stream in streams)
            for axes in dict.fromkeys((1, len(shape) - 2)):
                cuts = [OwnSlice(at, axis, streams, False, axes) for axis in range(len(shape) - axes + 1)]
                found = [cut for cut in cuts if (token_count(shape, cut), token_count(other, cut)) == sizes]
                if len(found) == 1 and sizes[0] > 1:
                    return found[0]
        return None

    def attend(self, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.runs_block:
            return function(*args, **kwargs)
        self.attended += 1
        whole, call = self.noted(), attention_call(function, *args, **kwargs)
        q, k, v = (
            self._streams(own, of_whole)
            for own, of_whole in zip((call.q_BQHD, call.k_BKHD, call.v_BKHD), whole.tensors, strict=True)
        )
        if q is None or k is None or k != v:
            raise Unproven(f"{self.block.name} attends to different values if its tokens are cut")
        mask = call.mask if k and call.key_mask is not None else None
        if mask is not None and mask.is_floating_point() and not bool(((mask == 0) | (mask <= HIDDEN)).all()):
            raise Unproven(f"{self.block.name} attends with a mask whose values are neither zero nor very negative")
        if k and not q:
            raise Unproven(f"{self.block.name} has attention in which the keys are cut, but the queries are not")
        heads, head_size = call.q_BQHD.shape[2:]
        sharing = next(each for each in range(heads, 0, -1) if shares_keys(*whole.tensors[1:], each)) if k else 1
        spec = OwnAttention(q, k, heads, head_size, sharing)
        self.blocks[self.number] = replace(self.block, attention=(*self.block.attention, spec))
        return call.result(whole.out[:, self.own_rows(q)]) if k else function(*args, **kwargs)

    def _streams(self, own: torch.Tensor, whole: torch.Tensor) -> tuple[int, ...] | None:
        """Return the streams whose tokens this rank's rows `own` are, in order. Empty: all rows. None: they are not rows of
        `whole`."""
        present = self._present
        counts = range(len(present) + 1)
        for streams in itertools.chain.from_iterable(itertools.permutations(present, count) for count in counts):
            total = sum(self.tokens[stream] for stream in streams)
            if (not streams or total == whole.shape[1]) and self.has_rows_of(own, whole, streams):
                return streams
        return None

    @property
    def _present(self) -> dict[int, int]:
        """Number of tokens of each stream that is in the blocks at present."""
        return {stream: tokens for stream, tokens in self.tokens.items() if stream >= self._gone}

    def leaves(self, number: int) -> bool:
        return self._placed or number in self._ends

    def leave(self, out: Any, is_known: bool = True) -> Any:
        values = (out,) if isinstance(out, torch.Tensor) else out
        leaving = [
            () if of_whole is None else self._streams(self.rows_of(value), self.rows_of(of_whole))
            for value, of_whole in zip(values, self._noted.outputs[self.number], strict=True)
        ]
        if any(streams is None for streams in leaving):
            raise Unproven(f"{self.block.name} returns different values if its tokens are cut")
        found = tuple(streams for streams in leaving if streams is not None)
        if self.number not in self._ends:
            self.blocks[self.number] = replace(self.block, placed=found)
            return super().leave(out)
        self.blocks[self.number] = replace(self.block, leaving=found)
        whole = super().leave(out)
        self._gone = len(self.tokens)
        self._entered.clear()
        return whole


ENDS = 0, RANKS - 1
SIDES, WORDS = (8, 16, 32, 64, 128, 256), 20
"""Limits of rows, columns and frames of a call: the first limit that gives enough tokens. Limit of text tokens."""
Size = tuple[int, int]
"""Size of a call: (limit of SIDES, limit of text tokens)."""


def runs_of_ranks(model: nn.Module, blocks: Sequence[OwnBlock], actual: Call) -> Iterator[Callable[[TensorRank], Any]]:
    """For each sequence rank, its runs of calls like `actual`, which TensorSharing tries. They return the model's output."""
    runs = Runs(model, blocks)
    for number, size in enumerate(runs.sizes(actual), 1):
        call = drawn(smaller(actual, *size), number)
        whole = runs.noted(call)
        for rank in range(RANKS):
            yield partial(_of_rank, runs, call, rank, whole)


def _of_rank(runs: "Runs", call: Call, rank: int, whole: WholeRun, tensor_rank: TensorRank) -> Any:
    return runs.run(call, ComparedRank(runs.blocks, rank, whole, tensor_rank), tensor_rank)


def cut_tokens(model: nn.Module, blocks: Sequence[OwnBlock], actual: Call, times: Sequence[float]) -> list[OwnBlock]:
    """Return `blocks` with how their tokens are cut. Raises Unproven if no cut is right for calls like `actual` at all of
    `times`."""
    runs = Runs(model, blocks)
    call, another = (smaller(actual, *size) for size in runs.sizes(actual))
    first, second = runs.noted(drawn(call, 1)), runs.noted(drawn(another, 1))
    if not any(first.calls):
        raise Unproven("its attention cannot be reached")
    calls = [drawn(call, 1), drawn(call, 2), *(drawn(call, 3, time) for time in times), drawn(another, 1)]
    streams, failures = sum(map(bool, runs.blocks[0].returns)), []
    # Behind its blocks a class counts the tokens that it drops by what it gave to them, or by what it got between them.
    all_but = (tuple(other for other in range(streams) if other != kept) for kept in range(streams))
    orders, last = list(itertools.permutations(range(max(streams, 2)))), len(runs.blocks) - 1
    # Between lists, such as refiners and layers, it may count on all tokens: then they leave each, and enter again.
    tried = dict.fromkeys([(last,), tuple(list_ends(runs.blocks))])
    ways = [(ends, each, False) for ends, each in itertools.product(tried, dict.fromkeys([(), *all_but]))]
    ways += [(ends, (), True) for ends in tried]  # it may count on all of them between blocks, too
    for (ends, of_rank, placed), order in itertools.product(ways, orders):
        learning = Learning(runs.blocks, first, second, order, of_rank, ends, placed)
        try:
            runs.check(learning, calls[0], first)
            runs.check_cut(learning.blocks, calls)
        except Unproven as unproven:
            failures.append((learning.number, unproven))
        else:
            return learning.blocks
    raise max(failures, key=lambda failure: failure[0])[1]  # of the order that came furthest


def list_ends(blocks: Sequence[OwnBlock]) -> list[int]:
    """Return the numbers of the last block of each list."""
    lists = [block.name.rpartition(".")[0] for block in blocks]
    return [number for number, name in enumerate(lists) if name not in lists[number + 1 :]]


class Runs:
    """Runs of `model`, whose blocks are `blocks`, in one process."""

    def __init__(self, model: nn.Module, blocks: Sequence[OwnBlock]):
        self.model, self.blocks = model, list(blocks)
        self.tokens: TokenCut | None = None
        """How the latest run cuts its tokens."""
        self._counted: dict[tuple[torch.Size, int], tuple[list[int], list[int]]] = {}

    def sizes(self, actual: Call) -> tuple[Size, Size]:
        """Return two sizes of calls like `actual`: one with few tokens, but enough for all ranks, and one with other numbers
        of tokens."""
        for side in SIDES:
            size = side, self._words(actual, side)
            call = smaller(actual, *size)
            tokens, another = self._most_tokens(call), self._another(call, size)
            # A class may fill up its tokens: a call of another size may have as many of them.
            told_apart = self._most_tokens(smaller(call, *another)) != tokens
            if call.x.shape == actual.x.shape or (tokens >= 4 * RANKS and told_apart):
                break
        return size, another

    def _words(self, actual: Call, side: int) -> int:
        """Return the limit of text tokens with which the streams of a call with these sides have unequal numbers of tokens,
        if possible. The order of equally long streams could not be told from their rows."""
        call = smaller(actual, side, WORDS)
        fewer = words_of(call) - 1
        is_tried = fewer >= RANKS and not self._have_unequal_streams(call)
        return fewer if is_tried and self._have_unequal_streams(smaller(call, side, fewer)) else WORDS

    def _another(self, call: Call, size: Size) -> Size:
        """Return a size with other numbers of text and image tokens than the call of `size`; `size` if there is none."""
        side, limit = size
        words = min(words_of(call), limit)
        # At least a word for each rank: classes may not run without any.
        fewer, less = max(min(words, RANKS), words - 3), call.longest * 3 // 4
        sizes = (less, fewer), (less, words), (side, fewer), (side // 2, words), (side // 2, fewer)
        tokens = self._most_tokens(call)
        counted = ((other, self._most_tokens(smaller(call, *other))) for other in sizes)  # as few runs as will do
        told_apart = (other for other, count in counted if count not in (0, tokens))
        running = (other for other in sizes if self._most_tokens(smaller(call, *other)))
        return next(itertools.chain(told_apart, running), size)

    def _most_tokens(self, call: Call) -> int:
        """Maximum number of tokens in a tensor that the first block gets. 0 if the class does not run with the call."""
        _, given = self._tokens(call)
        return max(given, default=0)

    def _have_unequal_streams(self, call: Call) -> bool:
        """Whether the class runs with the call, and no two streams of the first block have equal numbers of tokens."""
        streams, _ = self._tokens(call)
        return len(set(streams)) == len(streams) > 0

    def _tokens(self, call: Call) -> tuple[list[int], list[int]]:
        """Return the numbers of tokens of the streams that the first block returns, and of the tensors that it gets. Both
        are empty if the class does not run with the call."""
        size = call.x.shape, words_of(call)
        if size not in self._counted:
            noted, _ = found_or_why(partial(self.noted, drawn(call, 1)))
            returned = [] if noted is None else [value.shape for value in noted.outputs[0] if value is not None]
            given = [] if noted is None else [shape for shape in noted.shapes[0] if len(shape) > 2]
            streams, tensors = ([math.prod(shape[:-1]) // len(call.x) for shape in shapes] for shapes in (returned, given))
            self._counted[size] = streams, tensors
        return self._counted[size]

    def run(self, call: Call, cut: TokenCut | None = None, rank: TensorRank = ALL_LAYERS) -> Any:
        """Return the output of one stage with all blocks, without ComfyUI's transformer_options. `cut`: how tokens are
        cut."""
        self.tokens = cut
        with closing(StageBlocks(self.model, self.blocks, Span(0, len(self.blocks)), None, cut)) as stage:
            stage.add_up = rank.add_up
            return call.run(stage.call, options=False)

    def noted(self, call: Call) -> WholeRun:
        """Return the uncut model's run. Raises Unproven if it fails."""
        whole = WholeRun(self.blocks)
        with as_unproven("it does not run in a trial of cut tokens"):
            whole.result = self.run(call, whole)
        return whole

    def check(self, cut: TokenCut, call: Call, whole: WholeRun) -> None:
        """Raise Unproven if a rank's run of the call gives a wrong result."""
        with as_unproven("it does not run if its tokens are cut"):
            check_equal("cut tokens give a different result", self.run(call, cut), whole.result)

    def check_cut(self, blocks: Sequence[OwnBlock], calls: Sequence[Call], ranks: Sequence[int] = range(RANKS)) -> None:
        """Raise Unproven if these blocks' cut gives a wrong result on one of these ranks in one of the calls."""
        for call in calls:
            whole = self.noted(call)  # of one call at a time: it has the queries, keys and values of all blocks
            for rank in ranks:
                self.check(ComparedRank(blocks, rank, whole), call, whole)
