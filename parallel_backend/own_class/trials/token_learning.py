"""Learns how a class's tokens can be cut, by a rank's run that is held against one of the whole."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallel_backend.core.own_class import OwnAttention, OwnBlock, OwnSlice
from parallel_backend.own_class.calls.block_arguments import Arguments, by_place, tensor_places, token_axes, token_count
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.attention_calls import attention_call, shares_keys
from parallel_backend.own_class.trials.compared_runs import OTHER_MASK, RANKS, ComparedRank, WholeRun

HIDDEN = -1e4
"""What a mask adds at most where a key may not be seen."""


def without_token_cut(blocks: Sequence[OwnBlock]) -> list[OwnBlock]:
    """The blocks without the cut of their tokens."""
    return [replace(block, slices=(), attention=(), leaving=(), placed=()) for block in blocks]


def are_cut(blocks: Sequence[OwnBlock]) -> bool:
    """Whether the blocks have a cut of their tokens."""
    return any(block.slices for block in blocks)


class Learning(ComparedRank):
    """The last rank's run, from which the cut is learnt: `blocks` have it afterwards.

    `another`: a run of the whole with other numbers of tokens. `order`: the streams as tables of all tokens have them.
    `local`: see OwnBlock. `ends`: numbers of blocks behind which tokens leave. `placed`: see OwnBlock, behind all others.
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
            raise Unproven(f"{self.block.name} attends to different values if its tokens are cut")
        if k and whole.masked != (call.mask is not None):
            raise Unproven(f"{self.block.name} {OTHER_MASK}")
        if k and call.mask is not None and call.key_mask is not None:
            self._check_values(call.mask)
            self.mask_of_all(call.key_mask, k)
        if q and not k and call.rule is not None:
            raise Unproven(f"{self.block.name} attends by rows to keys that are not cut, with queries that are")
        if k and not q:
            raise Unproven(f"{self.block.name} attends to tokens that are cut, with queries that are not")
        heads, head_size = call.q_BQHD.shape[2:]
        sharing = next(each for each in range(heads, 0, -1) if shares_keys(*whole.tensors[1:], each)) if k else 1
        spec = OwnAttention(q, k, heads, head_size, sharing)
        self.blocks[self.number] = replace(self.block, attention=(*self.block.attention, spec))
        self._attended += 1
        return call.result(whole.out[:, self.own_rows(q)]) if k else function(*args, **kwargs)

    def _check_values(self, mask: torch.Tensor) -> None:
        if mask.is_floating_point() and not bool(((mask == 0) | (mask <= HIDDEN)).all()):
            raise Unproven(f"{self.block.name} attends with a mask whose values are neither zero nor very negative")

    def _streams(self, own: torch.Tensor, whole: torch.Tensor) -> tuple[int, ...] | None:
        """The streams whose tokens these rows of the whole are, in order. Empty: all rows. None: they are not a part of
        it."""
        present = self._present
        counts = range(len(present) + 1)
        for streams in itertools.chain.from_iterable(itertools.permutations(present, count) for count in counts):
            total = sum(self.tokens[stream] for stream in streams)
            if (not streams or total == whole.shape[1]) and self.has_rows_of(own, whole, streams):
                return streams
        return None

    @property
    def _present(self) -> dict[int, int]:
        """Tokens of each stream that has entered and not left."""
        return {stream: tokens for stream, tokens in self.tokens.items() if stream >= self._gone}

    def leaves(self, number: int) -> bool:
        return self._placed or number in self._ends

    def leave(self, out: Any, is_known: bool = True) -> Any:
        """Finds the streams of the block's output, see TokenCut.leave."""
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
