"""Calls of attention of ComfyUI's own class by the kernel that the user or a node has chosen, or block-sparse.

Without either, the function computes that the class calls, which is torch's on ranks.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

from parallel_backend.core.attention_kernels import SDPA
from parallel_backend.own_class.cuts.attention_calls import AttentionCall, Rows, attention_call

from .context import AttentionContext
from .sparse import Layout

QUANTISES = "low_precision_attention"
"""Argument of ComfyUI's functions. False: this call is to be computed without quantised queries and keys."""

ROWS = "rows"
"""Beginning of the keys of AttentionStep.kept under which numbers of rows are."""


class OwnKernels:
    """`running()`: name of the block that runs; empty outside of blocks."""

    def __init__(self, context: AttentionContext, running: Callable[[], str]):
        self._context, self._running = context, running

    def attend(self, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """A call of `function` with all tokens that it is over. Returns what the function would."""
        kernel, step = self._context.kernel, self._context.step
        by_rows = kwargs.get("rule") is not None
        if kernel.kernel.name == SDPA and (step is None or step.sparse is None) and not by_rows:
            return function(*args, **kwargs)
        call = attention_call(function, *args, **kwargs)
        if by_rows:
            return call.result(self._of_all_rows(call))
        others = call.q_BQHD.shape[2:] != call.v_BKHD.shape[2:]
        if others or call.mask is not None or call.arguments.get("is_causal"):
            kernel.leave(call.q_BQHD.dtype, "calls with values of another size" if others else "calls with a mask")
            return function(*args, **kwargs)
        gate = self._context.take_gate(call.q_BQHD)
        return call.result(self.compute(call, call.q_BQHD, call.k_BKHD, call.v_BKHD, None, gate_BQhD=gate))

    def _of_all_rows(self, call: AttentionCall) -> torch.Tensor:
        """[B, Q, H, D] of a call with a rule, which has all tokens in the class's order."""
        tensors = call.q_BQHD, call.k_BKHD, call.v_BKHD
        lengths = [x.shape[1] for x in tensors[:2]]
        queries_Q, keys_K = (self.numbers(("all", length), functools.partial(torch.arange, length)) for length in lengths)
        return self.by_rows(call, *tensors, queries_Q, keys_K)

    def numbers(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """[n] int64 in host memory: numbers of rows for a rule, the same tensor for each key in all calls that are alike."""
        assert self._context.step is not None, "attention outside of a micro-step"
        kept, key = self._context.step.kept, (ROWS, key)
        if key not in kept:
            kept[key] = make()
        return kept[key]

    def by_rows(
        self,
        call: AttentionCall,
        q_BQhD: torch.Tensor,
        k_BKhD: torch.Tensor,
        v_BKhD: torch.Tensor,
        queries_Q: torch.Tensor,
        keys_K: torch.Tensor,
    ) -> torch.Tensor:
        """[B, Q, h, D] of a call with a rule. Block-sparse attention takes no such call."""
        assert call.rule is not None
        if self._context.step is not None and self._context.step.sparse is not None:
            self._context.sparse_calls.lacked.add("attention of all tokens to all")

        def attend(q_BqhD: torch.Tensor, k_BkhD: torch.Tensor, v_BkhD: torch.Tensor) -> torch.Tensor:
            return self._in_full(call, q_BqhD, k_BkhD, v_BkhD, None)

        return call.rule(attend, Rows(q_BQhD, k_BKhD, v_BKhD, queries_Q, keys_K))

    def compute(
        self,
        call: AttentionCall,
        q_BQhD: torch.Tensor,
        k_BKhD: torch.Tensor,
        v_BKhD: torch.Tensor,
        mask_bK: torch.Tensor | None,
        streams: tuple[int, ...] = (),
        place_of_rows: Callable[[], torch.Tensor] | None = None,
        gate_BQhD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, Q, h, D]. `mask_bK`: bool, keys that are seen. `streams`, `place_of_rows`: see SparseStep.of_class.
        `gate_BQhD`: see SparseStep.attend."""
        if (layout := self._sparse_layout(call, q_BQhD, k_BKhD, mask_bK, streams, place_of_rows)) is not None:
            step = self._context.step
            assert step is not None and step.sparse is not None
            return step.sparse.attend(layout, q_BQhD, k_BKhD, v_BKhD, gate_BQhD, call.arguments.get("scale"))
        return self._in_full(call, q_BQhD, k_BKhD, v_BKhD, mask_bK)

    def _in_full(
        self,
        call: AttentionCall,
        q_BQhD: torch.Tensor,
        k_BKhD: torch.Tensor,
        v_BKhD: torch.Tensor,
        mask_bK: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `compute`, of all queries over all keys that are seen."""
        kernel = self._context.kernel
        exactly = call.arguments.get(QUANTISES) is False and not kernel.kernel.exact
        if exactly:
            kernel.leave(q_BQhD.dtype, "calls that the model wants in full precision")
        if exactly or kernel.kernel.name == SDPA:
            return call.compute(q_BQhD, k_BKhD, v_BKhD, mask_bK)
        mask_BK = None if mask_bK is None else mask_bK.expand(len(q_BQhD), -1)
        # Kernels want channels side by side.
        q_BQhD, k_BKhD, v_BKhD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BQhD, k_BKhD, v_BKhD))
        return kernel.attend(q_BQhD, k_BKhD, v_BKhD, mask_BK, call.arguments.get("scale"))

    def _sparse_layout(
        self,
        call: AttentionCall,
        q_BShD: torch.Tensor,
        k_BShD: torch.Tensor,
        mask: torch.Tensor | None,
        streams: tuple[int, ...],
        place_of_rows: Callable[[], torch.Tensor] | None,
    ) -> Layout | None:
        """The blocks, if ComfyUI's node would make the call block-sparse. None: in full."""
        step, calls = self._context.step, self._context.sparse_calls
        sparse = None if step is None else step.sparse
        exactly = call.arguments.get(QUANTISES) is False  # as natively a call with a mask, which LTX-2's factors stand for
        if sparse is None or exactly or mask is not None or self._running() in sparse.settings.full:
            return None
        if call.shares_keys or q_BShD.shape != k_BShD.shape or q_BShD.shape[1] < sparse.settings.least_tokens:
            return None
        if lacks := sparse.lacks(q_BShD):
            calls.lacked.add(lacks)
            return None
        layout = sparse.of_class(streams, place_of_rows, q_BShD.shape[1])
        calls.sparse += layout is not None
        return layout
