"""Finds out how a class's tokens can be cut over sequence ranks, and whether each rank then computes what the whole does.

One run of the whole model is noted: what its blocks get, attend to and return. A rank's run is held against it, one rank
after the other in one process: its queries, keys and values have to be rows of the whole's, and so has what its last block
returns.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from parallel_backend.core.own_class import OwnAttention, OwnBlock, OwnSlice
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span

from .attention_calls import AttentionCall, attention_call
from .noted_attention import Noted
from .stages import StageBlocks
from .token_cut import Arguments, TokenCut, by_place, list_ends, tensor_places
from .token_rows import token_axes, token_count
from .tried_calls import Call, distance, drawn, smaller, words_of
from .unproven import Unproven, first_line
from .whole_run import WholeRun

RANKS = 3
"""In the trial, so that they have different numbers of tokens."""
ENDS = 0, RANKS - 1
TOLERANCE = 1e-5
"""Largest difference of a rank's values and the whole's, as a share of the largest value."""
SIDES, WORDS = (8, 16, 32, 64, 128, 256), 20
"""Most latent rows, columns and frames of a call: the first with which there are enough tokens. Most tokens of text."""
OTHER_MASK = "attends with another mask where its tokens are cut"
Size = tuple[int, int]
"""Of a call: see SIDES and WORDS."""
HIDDEN = -1e4
"""What a mask adds at most where a key may not be seen."""


class HeldAgainst(TokenCut):
    """A rank's run that takes from the whole's what other ranks would send. Unproven where its own is no part of it.

    `tensor_rank`: whose part of the layers is in place (feature_trial.py)."""

    def __init__(self, blocks: Sequence[OwnBlock], index: int, whole: WholeRun, tensor_rank: int | None = None):
        super().__init__(blocks, index, SequenceCut((1.0,), RANKS, repeat_text=False))
        self._noted, self._tensor_rank = whole, tensor_rank
        self._attended = 0  # calls in the block that runs

    def enter(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        self._attended = 0
        return super().enter(number, args, kwargs)

    def attend(self, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        out = super().attend(function, *args, **kwargs)
        self._attended += self._coming is not None
        return out

    def noted(self) -> Noted:
        """What the whole has at the present call of attention."""
        calls = self._noted.calls[self.number]
        if self._attended >= len(calls):
            raise Unproven(f"{self.block.name} attends more often where its tokens are cut")
        return calls[self._attended]

    def exchange(self, spec: OwnAttention, call: AttentionCall, mask_bK: torch.Tensor | None) -> torch.Tensor:
        of_all = self.noted()
        if (heads := of_all.tensors[0].shape[2]) != spec.heads:
            raise Unproven(f"{self.block.name} attends with {heads} heads")
        whole = of_all if self._tensor_rank is None else of_all.of_tensor_rank(self._tensor_rank, call)
        if whole.masked != (mask_bK is not None):
            raise Unproven(f"{self.block.name} {OTHER_MASK}")
        of_both = (spec.queries, spec.keys, spec.keys)
        for own, of_whole, streams in zip((call.q_BQHD, call.k_BKHD, call.v_BKHD), whole.tensors, of_both, strict=True):
            if not self.is_held(own, of_whole, streams):
                raise Unproven(f"{self.block.name} attends to other values where its tokens are cut")
        return whole.out[:, self.own_rows(spec.queries)]

    def leave(self, out: Any, is_known: bool = True) -> Any:
        values = (out,) if isinstance(out, torch.Tensor) else out
        whole: list[torch.Tensor | None] = []
        for value, of_whole, streams in zip(values, self._noted.outputs[self.number], self.block.leaving, strict=True):
            if of_whole is None:
                whole.append(None)
                continue
            own, of_all = self.rows_of(value), self.rows_of(of_whole)
            if not self.is_held(own, of_all, streams):
                raise Unproven(f"{self.block.name} returns other values where its tokens are cut")
            whole.append(self.of_rows(self._left(own, self.left_by_all(own, of_all, streams), streams), value))
        return whole[0] if isinstance(out, torch.Tensor) else tuple(whole)

    def is_held(self, own: torch.Tensor, of_whole: torch.Tensor, streams: Sequence[int]) -> bool:
        """Whether `own` has this rank's rows of the whole's tokens of these streams."""
        return is_part(own, of_whole, self.own_rows(streams))

    def left_by_all(self, value: torch.Tensor, of_whole: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        """All tokens of a value that leaves the last block, as far as the ranks of this call have them."""
        return of_whole

    def _left(self, value: torch.Tensor, of_whole: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        """What leaves the last block in place of `value`: all tokens as the whole has them, of local streams this rank's."""
        if not self.block.local or not streams:
            return of_whole.clone()
        own, of_all = self.by_stream(value, streams), of_whole.split([self.tokens[stream] for stream in streams], dim=1)
        kept = (own[stream] if stream in self.block.local else each for stream, each in zip(streams, of_all, strict=True))
        return torch.cat(list(kept), dim=1)

    def gather(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        raise AssertionError("a run that is held against another leaves with its values")

    def mask_of_all(self, mask_bK: torch.Tensor, streams: tuple[int, ...]) -> torch.Tensor:
        whole = self.noted().key_mask
        if whole is None or not any(torch.equal(mask_bK, part) for part in (whole, whole[:, self.own_rows(streams)])):
            raise Unproven(f"{self.block.name} {OTHER_MASK}")
        return whole

    def own_rows(self, streams: Sequence[int]) -> slice | torch.Tensor:
        """This rank's rows of a tensor with all tokens of these streams, or of one that is not cut."""
        return self.rows(streams, self.index) if streams else slice(None)


class Learning(HeldAgainst):
    """The last rank's run, from which the cut is learnt: `blocks` have it afterwards.

    `another`: a run of the whole with other numbers of tokens. `order`: the streams as tables of all tokens have them.
    `local`: see OwnBlock. `ends`: numbers of blocks behind which tokens leave.
    """

    def __init__(
        self,
        blocks: Sequence[OwnBlock],
        whole: WholeRun,
        another: WholeRun,
        order: Sequence[int],
        local: tuple[int, ...],
        ends: Sequence[int],
    ):
        bare = [replace(block, slices=(), attention=(), leaving=()) for block in blocks]
        bare[-1] = replace(bare[-1], local=local)
        super().__init__(bare, RANKS - 1, whole)
        self._another, self._order, self._ends = another, order, ends
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
            raise Unproven(f"{block.name} gets other arguments in calls of two sizes")
        of_streams = {id(given[place]) for place in block.returns if place}
        entering: list[OwnSlice] = []
        tables: list[int] = []
        for at, (tensor, shape, other) in enumerate(zip(tensors, shapes, others, strict=True)):
            if tensor.shape != shape:
                continue  # made of tokens that are cut already
            if id(tensor) in of_streams:
                of_streams.discard(id(tensor))
                stream = len(self.tokens) + len(entering)
                axis, axes = token_axes(shape, other, len(self._noted.result))
                entering.append(OwnSlice(at, axis, (stream,), True, axes))
                self._entered[shape, other] = entering[-1]
                self._of_another[stream] = token_count(other, entering[-1])
            else:
                tables.append(at)
        known = self._present | {cut.streams[0]: token_count(shapes[cut.tensor], cut) for cut in entering}
        cuts = entering + [cut for at in tables if (cut := self._table(at, shapes[at], others[at], known))]
        self.blocks[number] = replace(block, slices=tuple(cuts))
        return super().enter(number, args, kwargs)

    def _table(self, at: int, shape: torch.Size, other: torch.Size, known: Mapping[int, int]) -> OwnSlice | None:
        """The cut of a tensor that has a row for each token of a stream, or of all in order. None: it has not."""
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
        if self._coming is None:
            return function(*args, **kwargs)
        whole, call = self.noted(), attention_call(function, *args, **kwargs)
        q, k, v = (
            self._streams(own, of_whole)
            for own, of_whole in zip((call.q_BQHD, call.k_BKHD, call.v_BKHD), whole.tensors, strict=True)
        )
        if q is None or k is None or k != v:
            raise Unproven(f"{self.block.name} attends to other values where its tokens are cut")
        if k and whole.masked != (call.mask is not None):
            raise Unproven(f"{self.block.name} {OTHER_MASK}")
        if k and call.mask is not None and call.key_mask is not None:
            self._check_values(call.mask)
            self.mask_of_all(call.key_mask, k)
        if k and not q:
            raise Unproven(f"{self.block.name} attends to tokens that are cut, with queries that are not")
        spec = OwnAttention(q, k, *call.q_BQHD.shape[2:])
        self.blocks[self.number] = replace(self.block, attention=(*self.block.attention, spec))
        self._attended += 1
        return call.result(whole.out[:, self.own_rows(q)]) if k else function(*args, **kwargs)

    def _check_values(self, mask: torch.Tensor) -> None:
        if mask.is_floating_point() and not bool(((mask == 0) | (mask <= HIDDEN)).all()):
            raise Unproven(f"{self.block.name} attends with a mask that adds other values than none and very negative ones")

    def _streams(self, own: torch.Tensor, whole: torch.Tensor) -> tuple[int, ...] | None:
        """The streams whose tokens these rows of the whole are, in order. Empty: all rows. None: they are no part of it."""
        present = self._present
        counts = range(len(present) + 1)
        for streams in itertools.chain.from_iterable(itertools.permutations(present, count) for count in counts):
            total = sum(self.tokens[stream] for stream in streams)
            if (not streams or total == whole.shape[1]) and is_part(own, whole, self.own_rows(streams)):
                return streams
        return None

    @property
    def _present(self) -> dict[int, int]:
        """Tokens of each stream that has entered and not left."""
        return {stream: tokens for stream, tokens in self.tokens.items() if stream >= self._gone}

    def leaves(self, number: int) -> bool:
        return number in self._ends

    def leave(self, out: Any, is_known: bool = True) -> Any:
        values = (out,) if isinstance(out, torch.Tensor) else out
        leaving = [
            () if of_whole is None else self._streams(self.rows_of(value), self.rows_of(of_whole))
            for value, of_whole in zip(values, self._noted.outputs[self.number], strict=True)
        ]
        if any(streams is None for streams in leaving):
            raise Unproven(f"{self.block.name} returns other values where its tokens are cut")
        self.blocks[self.number] = replace(self.block, leaving=tuple(streams for streams in leaving if streams is not None))
        whole = super().leave(out)
        self._gone = len(self.tokens)
        self._entered.clear()
        return whole


def is_part(own: torch.Tensor, whole: torch.Tensor, rows: slice | torch.Tensor) -> bool:
    """Whether `own` has these rows (axis 1) of `whole`."""
    part = whole[:, rows]
    return own.shape == part.shape and (not own.numel() or bool((own - part).abs().max() <= TOLERANCE * whole.abs().max()))


def cut_tokens(model: nn.Module, blocks: Sequence[OwnBlock], actual: Call, times: Sequence[float]) -> list[OwnBlock] | str:
    """`blocks` with the cut of their tokens, or why it is not proven for calls like `actual`, at these times too."""
    try:
        return _cut_tokens(Runs(model, blocks), blocks, actual, times)
    except Unproven as unproven:
        return str(unproven)


def why_not_cut(
    model: nn.Module,
    blocks: Sequence[OwnBlock],
    cut: Sequence[OwnBlock],
    calls: Sequence[Call],
    ranks: Sequence[int] = range(RANKS),
) -> str:
    """Why `cut`, `blocks` with the cut of their tokens, is not right for these calls on these ranks. Empty: it is."""
    try:
        return next(filter(None, Runs(model, blocks).checks(cut, calls, ranks)), "")
    except Unproven as unproven:
        return str(unproven)


def runs_of_ranks(
    model: nn.Module, blocks: Sequence[OwnBlock], cut: Sequence[OwnBlock], actual: Call
) -> Iterator[Callable[[int | None], Any]]:
    """Each sequence rank's runs of calls like `actual`, for tensor ranks to be tried in. They give the model's output."""
    runs = Runs(model, blocks)
    for number, size in enumerate(runs.sizes(actual), 1):
        one = drawn(smaller(actual, *size), number)
        whole = runs.noted(one)
        yield from (functools.partial(_of_rank, runs, one, cut, rank, whole) for rank in range(RANKS))


def _of_rank(runs: "Runs", call: Call, cut: Sequence[OwnBlock], rank: int, whole: WholeRun, tensor_rank: int | None) -> Any:
    return runs.run(call, HeldAgainst(cut, rank, whole, tensor_rank))


def _cut_tokens(runs: "Runs", blocks: Sequence[OwnBlock], actual: Call, times: Sequence[float]) -> list[OwnBlock] | str:
    """As cut_tokens. Unproven if the whole model does not run with calls of other sizes."""
    call, another = (smaller(actual, *size) for size in runs.sizes(actual))
    first, second = runs.noted(drawn(call, 1)), runs.noted(drawn(another, 1))
    if not any(first.calls):
        return "its attention cannot be reached"
    calls = [drawn(call, 1), drawn(call, 2), *(drawn(call, 3, time) for time in times), drawn(another, 1)]
    streams, failures = sum(map(bool, blocks[0].returns)), []
    # Behind its blocks a class counts the tokens that it drops by what it gave to them, or by what it got between them.
    all_but = (tuple(other for other in range(streams) if other != kept) for kept in range(streams))
    orders, last = list(itertools.permutations(range(max(streams, 2)))), len(blocks) - 1
    # Between lists, such as refiners and layers, it may count on all tokens: then they leave each, and enter again.
    tried = dict.fromkeys([(last,), tuple(list_ends(blocks))])
    for ends, of_rank, order in itertools.product(tried, dict.fromkeys([(), *all_but]), orders):
        learning = Learning(blocks, first, second, order, of_rank, ends)
        why = runs.why_not(learning, calls[0], first) or next(filter(None, runs.checks(learning.blocks, calls)), "")
        if not why:
            return learning.blocks
        failures.append((learning.number, why))
    return max(failures, key=lambda failure: failure[0])[1]  # of the order that came furthest


class Runs:
    """Calls of `model`, which has these blocks."""

    def __init__(self, model: nn.Module, blocks: Sequence[OwnBlock]):
        self.model, self._blocks = model, blocks
        self._counted: dict[tuple[torch.Size, int], int] = {}

    def sizes(self, actual: Call) -> tuple[Size, Size]:
        """Of calls like `actual`: with few tokens that ranks still share out, and with other numbers of them."""
        words = words_of(actual)
        for side in SIDES:
            call = smaller(actual, side, WORDS)
            tokens, another = self._most_tokens(call), self._another(call, side, words)
            # A class may fill up its tokens: a call of another size may have as many of them.
            told_apart = self._most_tokens(smaller(call, *another)) != tokens
            if call.x.shape == actual.x.shape or (tokens >= 4 * RANKS and told_apart):
                break
        return (side, WORDS), another

    def _another(self, call: Call, side: int, words: int) -> Size:
        """Other numbers of tokens than the call's, of text and picture if possible. The call's own if there are none."""
        words = min(words, WORDS)
        # At least a word for each rank: classes may not run without any.
        fewer, less = max(min(words, RANKS), words - 3), call.longest * 3 // 4
        sizes = (less, fewer), (less, words), (side, fewer), (side // 2, words), (side // 2, fewer)
        counts, tokens = [self._most_tokens(smaller(call, *each)) for each in sizes], self._most_tokens(call)
        told_apart = [size for size, count in zip(sizes, counts, strict=True) if count not in (0, tokens)]
        return next(iter(told_apart or itertools.compress(sizes, counts)), (side, WORDS))

    def _most_tokens(self, call: Call) -> int:
        """Of a tensor that the first block gets. 0 if the class does not run with the call."""
        size = call.x.shape, words_of(call)
        if size not in self._counted:
            try:
                shapes = self.noted(drawn(call, 1)).shapes[0]
            except Unproven:
                shapes = []
            self._counted[size] = max(
                (math.prod(shape[:-1]) // len(call.x) for shape in shapes if len(shape) > 2), default=0
            )
        return self._counted[size]

    def run(self, call: Call, cut: TokenCut) -> Any:
        stage = StageBlocks(self.model, self._blocks, Span(0, len(self._blocks)), None, cut)
        try:
            return call.run(stage.call, options=False)
        finally:
            stage.remove()

    def noted(self, call: Call) -> WholeRun:
        """The whole model's run. Unproven if it fails."""
        whole = WholeRun(self._blocks)
        try:
            whole.result = self.run(call, whole)
        except Unproven:
            raise
        except Exception as error:  # of any kind: its code is not known
            raise Unproven(f"it does not run in a trial of cut tokens ({first_line(error)})") from error
        return whole

    def why_not(self, cut: TokenCut, call: Call, whole: WholeRun) -> str:
        """What is wrong with a rank's run of the call. Empty: nothing."""
        try:
            far = distance(self.run(call, cut), whole.result)
        except Unproven as unproven:
            return str(unproven)
        except Exception as error:  # of any kind: its code is not known
            return f"it does not run where its tokens are cut ({first_line(error)})"
        return "" if far <= TOLERANCE else f"cut tokens give another result (by {far:.1e} of the largest value)"

    def checks(
        self, blocks: Sequence[OwnBlock], calls: Sequence[Call], ranks: Sequence[int] = range(RANKS)
    ) -> Iterator[str]:
        """`why_not` of these ranks in every call."""
        for call in calls:
            whole = self.noted(call)  # of one call at a time: it has the queries, keys and values of all blocks
            for rank in ranks:
                yield self.why_not(HeldAgainst(blocks, rank, whole), call, whole)
