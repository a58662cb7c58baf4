"""Finds out how a class's tokens can be cut over sequence ranks, and whether each rank then computes what the whole does.

One run of the whole model is noted: what its blocks get, attend to and return. A rank's run is held against it, one rank
after the other in one process: its queries, keys and values have to be rows of the whole's, and so has what its last block
returns.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_backend.core.own_class import OwnBlock
from parallel_backend.own_class.calls.tried_calls import Call, drawn, smaller, words_of
from parallel_backend.own_class.calls.unproven import Unproven, first_line
from parallel_backend.own_class.cuts.guided_attention import Sum, own_sums
from parallel_backend.own_class.cuts.token_cut import TokenCut
from parallel_backend.own_class.trials.compared_runs import RANKS, ComparedRank, TensorRank, WholeRun
from parallel_backend.own_class.trials.comparison import difference, why_not
from parallel_backend.own_class.trials.stage_trial import run_in_one
from parallel_backend.own_class.trials.token_learning import Learning

ENDS = 0, RANKS - 1
SIDES, WORDS = (8, 16, 32, 64, 128, 256), 20
"""Maximum rows, columns and frames of a call: the first with which there are enough tokens. Maximum tokens of text."""
Size = tuple[int, int]
"""Size of a call: see SIDES and WORDS."""


def cut_tokens(model: nn.Module, blocks: Sequence[OwnBlock], actual: Call, times: Sequence[float]) -> list[OwnBlock] | str:
    """`blocks` with the cut of their tokens, or why it is not proven for calls like `actual`, at these times too."""
    try:
        return _cut_tokens(Runs(model, blocks), actual, times)
    except Unproven as unproven:
        return str(unproven)


def why_not_cut(
    model: nn.Module, blocks: Sequence[OwnBlock], calls: Sequence[Call], ranks: Sequence[int] = range(RANKS)
) -> str:
    """Why the cut of these blocks' tokens is not right for these calls on these ranks. Empty: it is."""
    try:
        return Runs(model, blocks).why_not_cut(blocks, calls, ranks)
    except Unproven as unproven:
        return str(unproven)


def runs_of_ranks(
    model: nn.Module, blocks: Sequence[OwnBlock], actual: Call, add_up: Sum = own_sums
) -> Iterator[Callable[[TensorRank | None], Any]]:
    """Each sequence rank's runs of calls like `actual`, for tensor ranks to be tried in. They give the model's output."""
    runs = Runs(model, blocks, add_up)
    for number, size in enumerate(runs.sizes(actual), 1):
        call = drawn(smaller(actual, *size), number)
        whole = runs.noted(call)
        for rank in range(RANKS):
            yield partial(_of_rank, runs, call, rank, whole)


def _of_rank(runs: "Runs", call: Call, rank: int, whole: WholeRun, tensor_rank: TensorRank | None) -> Any:
    return runs.run(call, ComparedRank(runs.blocks, rank, whole, tensor_rank))


def _cut_tokens(runs: "Runs", actual: Call, times: Sequence[float]) -> list[OwnBlock] | str:
    """As cut_tokens. Unproven if the whole model does not run with calls of other sizes."""
    call, another = (smaller(actual, *size) for size in runs.sizes(actual))
    first, second = runs.noted(drawn(call, 1)), runs.noted(drawn(another, 1))
    if not any(first.calls):
        return "its attention cannot be reached"
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
        why = runs.why_not(learning, calls[0], first) or runs.why_not_cut(learning.blocks, calls)
        if not why:
            return learning.blocks
        failures.append((learning.number, why))
    return max(failures, key=lambda failure: failure[0])[1]  # of the order that came furthest


def list_ends(blocks: Sequence[OwnBlock]) -> list[int]:
    """Numbers of the last block of each list."""
    lists = [block.name.rpartition(".")[0] for block in blocks]
    return [number for number, name in enumerate(lists) if name not in lists[number + 1 :]]


class Runs:
    """Runs of `model`, whose blocks are `blocks`, in one process. `add_up`: see run_in_one."""

    def __init__(self, model: nn.Module, blocks: Sequence[OwnBlock], add_up: Sum = own_sums):
        self.model, self.blocks, self._add_up = model, list(blocks), add_up
        self._counted: dict[tuple[torch.Size, int], int] = {}

    def sizes(self, actual: Call) -> tuple[Size, Size]:
        """Sizes of calls like `actual`: one with few tokens that ranks still share, and one with other numbers of tokens."""
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
        """A size with other numbers of tokens than the call's, of text and image if possible. The call's own if there is
        none."""
        words = min(words, WORDS)
        # At least a word for each rank: classes may not run without any.
        fewer, less = max(min(words, RANKS), words - 3), call.longest * 3 // 4
        sizes = (less, fewer), (less, words), (side, fewer), (side // 2, words), (side // 2, fewer)
        counts, tokens = [self._most_tokens(smaller(call, *each)) for each in sizes], self._most_tokens(call)
        told_apart = [size for size, count in zip(sizes, counts, strict=True) if count not in (0, tokens)]
        return next(iter(told_apart or itertools.compress(sizes, counts)), (side, WORDS))

    def _most_tokens(self, call: Call) -> int:
        """Maximum number of tokens of a tensor that the first block gets. 0 if the class does not run with the call."""
        size = call.x.shape, words_of(call)
        if size not in self._counted:
            try:
                shapes = self.noted(drawn(call, 1)).shapes[0]
            except Unproven:
                shapes = []
            tokens = (math.prod(shape[:-1]) // len(call.x) for shape in shapes if len(shape) > 2)
            self._counted[size] = max(tokens, default=0)
        return self._counted[size]

    def run(self, call: Call, cut: TokenCut) -> Any:
        """The model's output, with tokens cut by `cut`."""
        return run_in_one(self.model, self.blocks, call, cut, self._add_up)

    def noted(self, call: Call) -> WholeRun:
        """The whole model's run. Unproven if it fails."""
        whole = WholeRun(self.blocks)
        try:
            whole.result = self.run(call, whole)
        except Unproven:
            raise
        except Exception as error:  # of any kind: its code is not known
            raise Unproven(f"it does not run in a trial of cut tokens ({first_line(error)})") from error
        return whole

    def why_not(self, cut: TokenCut, call: Call, whole: WholeRun) -> str:
        """Why a rank's run of the call is wrong. Empty: it is right."""

        def tried() -> str:
            return difference("cut tokens give a different result", self.run(call, cut), whole.result)

        return why_not(tried, "it does not run if its tokens are cut")

    def why_not_cut(self, blocks: Sequence[OwnBlock], calls: Sequence[Call], ranks: Sequence[int] = range(RANKS)) -> str:
        """What is wrong with these blocks' cut on one of these ranks in one of the calls. Empty: nothing."""
        for call in calls:
            whole = self.noted(call)  # of one call at a time: it has the queries, keys and values of all blocks
            for rank in ranks:
                if why := self.why_not(ComparedRank(blocks, rank, whole), call, whole):
                    return why
        return ""
