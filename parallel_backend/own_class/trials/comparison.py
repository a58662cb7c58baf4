"""Compares a rank's run with the uncut model's, whose values are recorded: the rank's values must be rows of them. A
difference raises Unproven."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from parallel_backend.core.own_class import OwnAttention, OwnBlock
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.own_class.calls.block_arguments import Arguments, tensor_places
from parallel_backend.own_class.calls.tried_calls import distance
from parallel_backend.own_class.calls.unproven import Unproven, first_line
from parallel_backend.own_class.cuts.attention_calls import AttentionCall, Rows, attention_call, shares_keys
from parallel_backend.own_class.cuts.band_tokens import ONE
from parallel_backend.own_class.cuts.guided_attention import Sum, own_sums
from parallel_backend.own_class.cuts.token_cut import TokenCut

Value = TypeVar("Value")
TOLERANCE = 1e-5
"""Largest allowed difference from the uncut model's values, divided by the largest of those values."""


def check_equal(what: str, out: torch.Tensor, whole: torch.Tensor) -> None:
    """Raise Unproven, with `what` and the difference, if an output differs from the uncut model's by more than rounding."""
    far = distance(out, whole) if out.shape == whole.shape else math.inf
    if far > TOLERANCE:
        raise Unproven(f"{what} (by {far:.1e} of the largest value)")


def close(a: torch.Tensor, b: torch.Tensor, whole: torch.Tensor | None = None) -> bool:
    """Whether `a` and `b` differ only by rounding, relative to the largest value of `whole`, or of `b` if it is None."""
    if a.shape != b.shape or not a.numel():  # a sequence rank may have no token of a stream
        return a.shape == b.shape
    return bool((a - b).abs().max() <= TOLERANCE * (b if whole is None else whole).abs().max())


@contextmanager
def as_unproven(fails: str, before: str = "") -> Iterator[None]:
    """Context in which all errors become Unproven, because a class may raise any. The text is `fails` and the error's first
    line; for an Unproven, `before` and its text."""
    try:
        yield
    except Unproven as unproven:
        raise Unproven(f"{before}{unproven}") from unproven
    except Exception as error:
        raise Unproven(f"{fails} ({first_line(error)})") from error


def found_or_why(find: Callable[[], Value]) -> tuple[Value | None, str]:
    """Return (what `find` returns, ""), or (None, the text of the Unproven that it raises)."""
    try:
        return find(), ""
    except Unproven as unproven:
        return None, str(unproven)


def why_not(check: Callable[[], object]) -> str:
    """Return the text of the Unproven that `check` raises. Empty: it raises none."""
    return found_or_why(check)[1]


@dataclass(frozen=True)
class TensorRank:
    """One of `count` tensor ranks. If `count` is 1, it has all of each layer."""

    index: int
    count: int
    add_up: Sum = own_sums
    """Sums over the tensor ranks, for guided attention."""


ALL_LAYERS = TensorRank(0, 1)


@dataclass(frozen=True)
class NotedAttention:
    """An attention call in the uncut model: (queries, keys, values) and output, each [B, S, H, D]."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    out: torch.Tensor
    masked: bool
    key_mask: torch.Tensor | None
    """Like AttentionCall.key_mask. Also None if the mask is not a mask of keys."""

    def of_tensor_rank(self, rank: TensorRank, call: AttentionCall) -> "NotedAttention":
        """Return a copy with only the heads of a tensor rank. `call`: the rank's own call."""

        def part(whole_BSHD: torch.Tensor, own_BSHD: torch.Tensor) -> torch.Tensor:
            whole, heads = whole_BSHD.shape[2], own_BSHD.shape[2]
            if heads == whole or rank.count == 1:
                return whole_BSHD
            # Ranks with more heads come first: as many as this one has before it, or behind it if it has fewer.
            behind = (rank.count - 1 - rank.index) * heads
            start = rank.index * heads if heads * rank.count >= whole else whole - behind - heads
            return whole_BSHD[:, :, start : start + heads]

        q, k, v = self.tensors
        parts = part(q, call.q_BQHD), part(k, call.k_BKHD), part(v, call.v_BKHD)
        return replace(self, tensors=parts, out=part(self.out, call.q_BQHD))


class WholeRun(TokenCut):
    """The uncut model's run, in which attention calls and outputs of blocks are recorded."""

    def __init__(self, blocks: Sequence[OwnBlock]):
        super().__init__([replace(block, attention=()) for block in blocks], 0, ONE)
        self.shapes: list[list[torch.Size]] = []
        """For each block, the shapes of its tensor arguments."""
        self.calls: list[list[NotedAttention]] = []
        """For each block, its attention calls."""
        self.outputs: dict[int, tuple[torch.Tensor | None, ...]] = {}
        """Number of a block -> its outputs."""
        self.result: Any = None
        """The model's output."""

    def enter(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        self.number = number
        leaves = pytree.tree_leaves((args, kwargs))
        self.shapes.append([leaves[at].shape for at in tensor_places(leaves)])
        self.calls.append([])
        return args, kwargs

    def attend(self, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.runs_block:
            return function(*args, **kwargs)
        call, out = attention_call(function, *args, **kwargs), function(*args, **kwargs)
        tensors = call.q_BQHD.clone(), call.k_BKHD.clone(), call.v_BKHD.clone()
        of_heads = out.transpose(1, 2) if call.heads_first else out.unflatten(-1, (call.q_BQHD.shape[2], -1))
        key_mask, _ = found_or_why(lambda: call.key_mask)  # why not is said where the call is cut
        self.calls[-1].append(NotedAttention(tensors, of_heads.clone(), call.mask is not None, key_mask))
        return out

    def leaves(self, number: int) -> bool:
        return True

    def leave(self, out: Any, is_known: bool = True) -> Any:
        values = (out,) if isinstance(out, torch.Tensor) else out
        self.outputs[self.number] = tuple(None if value is None else value.clone() for value in values)
        return out

    def exchange(self, spec: OwnAttention, call: AttentionCall, mask_bK: torch.Tensor | None) -> torch.Tensor:
        raise AssertionError("nothing is cut")

    def gather(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        raise AssertionError("nothing is cut")


RANKS = 3
"""Number of ranks in the trial. With 3, ranks have different numbers of tokens."""
OTHER_MASK = "attends with a different mask if its tokens are cut"


class ComparedRank(TokenCut):
    """The run of one sequence rank. Values from other ranks are taken from the uncut run.

    Raises Unproven if a value of the rank is not a part of the uncut run's. `tensor_rank`: which part of each layer's
    weights the model has at present (feature_trial.py).
    """

    def __init__(self, blocks: Sequence[OwnBlock], index: int, whole: WholeRun, tensor_rank: TensorRank = ALL_LAYERS):
        super().__init__(blocks, index, SequenceCut((1.0,), RANKS, repeat_text=False))
        self._noted, self._tensor_rank = whole, tensor_rank
        self._leaving: dict[int, torch.Tensor] = {}  # by stream: the whole's tokens of the value that leaves

    def noted(self) -> NotedAttention:
        """Return the recorded values of the uncut run for the present attention call. Raises Unproven if the uncut run has
        no such call."""
        calls = self._noted.calls[self.number]
        if self.attended > len(calls):
            raise Unproven(f"{self.block.name} attends more often if its tokens are cut")
        return calls[self.attended - 1]

    def exchange(self, spec: OwnAttention, call: AttentionCall, mask_bK: torch.Tensor | None) -> torch.Tensor:
        of_all = self.noted()
        if (heads := of_all.tensors[0].shape[2]) != spec.heads:
            raise Unproven(f"{self.block.name} attends with {heads} heads")
        whole = of_all.of_tensor_rank(self._tensor_rank, call)
        if whole.masked != (mask_bK is not None):
            raise Unproven(f"{self.block.name} {OTHER_MASK}")
        of_both = (spec.queries, spec.keys, spec.keys)
        for own, of_whole, streams in zip((call.q_BQHD, call.k_BKHD, call.v_BKHD), whole.tensors, of_both, strict=True):
            if not self.has_rows_of(own, of_whole, streams):
                raise Unproven(f"{self.block.name} attends to different values if its tokens are cut")
        # A tensor rank that has only some of the heads that share keys sends and keeps those of each.
        if call.k_BKHD.shape[2] % spec.sharing == 0 and not shares_keys(call.k_BKHD, call.v_BKHD, spec.sharing):
            raise Unproven(f"{self.block.name} attends with heads that share no keys")
        if call.rule is not None and not self._is_ruled(call, whole, self.own_rows(spec.queries)):
            raise Unproven(f"{self.block.name} attends differently for each row if its tokens are cut")
        return whole.out[:, self.own_rows(spec.queries)]

    def _is_ruled(self, call: AttentionCall, whole: NotedAttention, rows: slice | torch.Tensor) -> bool:
        """Whether attention by the call's rule gives these rows of the uncut output. It gets only these query rows, and
        the keys in reverse order."""
        assert call.rule is not None
        q_BQHD, k_BKHD, v_BKHD = whole.tensors
        queries, keys = torch.arange(q_BQHD.shape[1])[rows], torch.arange(k_BKHD.shape[1]).flip(0)
        of_rows = Rows(q_BQHD[:, queries], k_BKHD[:, keys], v_BKHD[:, keys], queries, keys)
        plain = functools.partial(call.compute, mask_bK=None)
        return close(call.rule(plain, of_rows), whole.out[:, queries], whole.out)

    def left(self, number: int, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        of_whole = self._noted.outputs[self.number][number]
        if of_whole is None or not self.has_rows_of(value, of_all := self.rows_of(of_whole), streams):
            raise Unproven(f"{self.block.name} returns different values if its tokens are cut")
        if streams:
            tokens = of_all.split([self.tokens[stream] for stream in streams], dim=1)
            self._leaving = dict(zip(streams, tokens, strict=True))
        return super().left(number, value, streams)

    def has_rows_of(self, own: torch.Tensor, of_whole: torch.Tensor, streams: Sequence[int]) -> bool:
        """Whether `own` equals this rank's rows of the uncut value `of_whole`, whose tokens are those of these streams."""
        return close(own, of_whole[:, self.own_rows(streams)], of_whole)

    def gather(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        """Return the uncut run's tokens of the value that leaves the blocks, rank by rank."""
        return torch.cat([self._leaving[stream] for stream in streams], dim=1)[:, self.all_rows(streams, value.device)]

    def mask_of_all(self, mask_bK: torch.Tensor, streams: tuple[int, ...]) -> torch.Tensor:
        whole = self.noted().key_mask
        if whole is None or not any(torch.equal(mask_bK, part) for part in (whole, whole[:, self.own_rows(streams)])):
            raise Unproven(f"{self.block.name} {OTHER_MASK}")
        return whole

    def own_rows(self, streams: Sequence[int]) -> slice | torch.Tensor:
        """Return this rank's rows of a tensor with all tokens of these streams. Without streams, all rows."""
        return self.rows(streams, self.index) if streams else slice(None)
