"""A rank's run in a trial, held against a run of the whole: its values have to be rows of the whole's."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel_backend.core.own_class import OwnAttention, OwnBlock
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.own_class.calls.block_arguments import Arguments
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.attention_calls import AttentionCall, Rows, shares_keys
from parallel_backend.own_class.cuts.token_cut import TokenCut
from parallel_backend.own_class.trials.comparison import close
from parallel_backend.own_class.trials.whole_run import Noted, TensorRank, WholeRun

RANKS = 3
"""In the trial, so that they have different numbers of tokens."""
OTHER_MASK = "attends with another mask if its tokens are cut"


class HeldAgainst(TokenCut):
    """A rank's run that takes from the whole's what other ranks would send. Unproven where its own is no part of it.

    `tensor_rank`: whose part of the layers is in place (feature_trial.py)."""

    def __init__(self, blocks: Sequence[OwnBlock], index: int, whole: WholeRun, tensor_rank: TensorRank | None = None):
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
            raise Unproven(f"{self.block.name} attends more often if its tokens are cut")
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
                raise Unproven(f"{self.block.name} attends to other values if its tokens are cut")
        # A tensor rank that has only some of the heads that share keys sends and keeps those of each.
        if call.k_BKHD.shape[2] % spec.sharing == 0 and not shares_keys(call.k_BKHD, call.v_BKHD, spec.sharing):
            raise Unproven(f"{self.block.name} attends with heads that share no keys")
        if call.rule is not None and not self._is_ruled(call, whole, self.own_rows(spec.queries)):
            raise Unproven(f"{self.block.name} attends by rows in another way where its tokens are cut")
        return whole.out[:, self.own_rows(spec.queries)]

    def _is_ruled(self, call: AttentionCall, whole: Noted, rows: slice | torch.Tensor) -> bool:
        """Whether the call's rule gives these rows of the whole's output, with the keys in another order."""
        assert call.rule is not None
        q_BQHD, k_BKHD, v_BKHD = whole.tensors
        queries, keys = torch.arange(q_BQHD.shape[1])[rows], torch.arange(k_BKHD.shape[1]).flip(0)
        of_rows = Rows(q_BQHD[:, queries], k_BKHD[:, keys], v_BKHD[:, keys], queries, keys)
        plain = functools.partial(call.compute, mask_bK=None)
        return close(call.rule(plain, of_rows), whole.out[:, queries], whole.out)

    def left(self, number: int, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        of_whole = self._noted.outputs[self.number][number]
        if of_whole is None or not self.is_held(value, of_all := self.rows_of(of_whole), streams):
            raise Unproven(f"{self.block.name} returns other values if its tokens are cut")
        if self.block.placed:
            return self.at_places(value, streams)
        return self._with_local(value, self.left_by_all(value, of_all, streams), streams)

    def is_held(self, own: torch.Tensor, of_whole: torch.Tensor, streams: Sequence[int]) -> bool:
        """Whether `own` has this rank's rows of the whole's tokens of these streams."""
        return close(own, of_whole[:, self.own_rows(streams)], of_whole)

    def left_by_all(self, value: torch.Tensor, of_whole: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        """All tokens of a value that leaves the last block, as far as the ranks of this call have them."""
        return of_whole

    def _with_local(self, value: torch.Tensor, of_whole: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
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
