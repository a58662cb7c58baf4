"""Attention of queries to keys that this rank has: dense, block-sparse, or by a rule. These are the last forms of a call."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

from parallel_backend.core.attention_kernels import SDPA
from parallel_backend.core.spans import Span
from parallel_backend.own_class.cuts.attention_calls import AttentionCall, Rows, attention_call

from .context import AttentionContext, AttentionStep, Form, LayerCall
from .sparse import Layout, SparseCalls, SparseStep

QUANTISES = "low_precision_attention"
"""Argument of ComfyUI's functions. False: this call must not quantize queries and keys."""

ROWS = "rows"
"""First item of the keys of AttentionStep.kept for numbers of rows."""


class InFull:
    """Dense attention by the kernel that the user or a node has chosen. For SDPA that is the class's own function."""

    def attend(self, at: LayerCall, q_BQhD: torch.Tensor, k_BKhD: torch.Tensor, v_BKhD: torch.Tensor) -> torch.Tensor:
        call, kernel, mask_bK = at.call, at.step.kernel, at.mask_bK
        exactly = call.arguments.get(QUANTISES) is False and not kernel.kernel.exact
        if exactly:
            kernel.leave(q_BQhD.dtype, "calls that the model wants in full precision")
        if exactly or kernel.kernel.name == SDPA:
            return call.compute(q_BQhD, k_BKhD, v_BKhD, mask_bK)
        mask_BK = None if mask_bK is None else mask_bK.expand(len(q_BQhD), -1)
        # Kernels want channels side by side.
        q_BQhD, k_BKhD, v_BKhD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BQhD, k_BKhD, v_BKhD))
        return kernel.attend(q_BQhD, k_BKhD, v_BKhD, mask_BK, call.arguments.get("scale"))


class ByRows:
    """Attention by the call's rule, which says from the row numbers of a query and a key whether the query sees the key.
    Block-sparse attention does not support such calls."""

    def __init__(self, in_full: Form, sparse_calls: SparseCalls):
        self._in_full, self._sparse_calls = in_full, sparse_calls

    def attend(self, at: LayerCall, q_BQhD: torch.Tensor, k_BKhD: torch.Tensor, v_BKhD: torch.Tensor) -> torch.Tensor:
        assert at.call.rule is not None
        if at.step.sparse is not None:
            self._sparse_calls.lacked.add("attention of all tokens to all")
        at.mask_bK = None
        numbers = at.rows.numbers(at, q_BQhD.shape[1], k_BKhD.shape[1])
        return at.call.rule(functools.partial(self._in_full.attend, at), Rows(q_BQhD, k_BKhD, v_BKhD, *numbers))


class Sparse:
    """Block-sparse attention of the calls that ComfyUI's node would make sparse, dense attention of others. `running()`:
    name of the block that runs."""

    def __init__(self, in_full: Form, sparse_calls: SparseCalls, running: Callable[[], str]):
        self._in_full, self._sparse_calls, self._running = in_full, sparse_calls, running

    def attend(self, at: LayerCall, q_BQhD: torch.Tensor, k_BKhD: torch.Tensor, v_BKhD: torch.Tensor) -> torch.Tensor:
        sparse = at.step.sparse
        assert sparse is not None
        layout = self._layout(at, sparse, q_BQhD, k_BKhD)
        if layout is None:
            return self._in_full.attend(at, q_BQhD, k_BKhD, v_BKhD)
        return sparse.attend(layout, q_BQhD, k_BKhD, v_BKhD, at.gate_BQhD, at.call.arguments.get("scale"))

    def _layout(self, at: LayerCall, sparse: SparseStep, q_BShD: torch.Tensor, k_BShD: torch.Tensor) -> Layout | None:
        """Return the blocks for sparse attention. None: the call is dense."""
        # A call for full precision is natively one with a mask, which LTX-2's factors stand for.
        whole = at.call.arguments.get(QUANTISES) is False or at.mask_bK is not None
        if whole or self._running() in sparse.settings.full:
            return None
        if at.call.shares_keys or q_BShD.shape != k_BShD.shape or q_BShD.shape[1] < sparse.settings.least_tokens:
            return None
        if lacks := sparse.lacks(q_BShD):
            self._sparse_calls.lacked.add(lacks)
            return None
        streams = at.spec.queries
        layout = sparse.of_class(streams, at.rows.places(streams), q_BShD.shape[1])
        self._sparse_calls.sparse += layout is not None
        return layout


class StageAttention:
    """Attention of a loaded stage: calls with all tokens on this rank, and the last form of other calls. `running()`: name
    of the block that runs; empty between blocks."""

    def __init__(self, context: AttentionContext, running: Callable[[], str]):
        self.context = context
        self.step: AttentionStep | None = None
        """The present micro-step."""
        self.sparse_calls = SparseCalls()
        self._in_full = InFull()
        self._by_rows = ByRows(self._in_full, self.sparse_calls)
        self._sparse = Sparse(self._in_full, self.sparse_calls, running)

    def kernel_of(self, call: AttentionCall, step: AttentionStep) -> Form:
        """Return the form that computes the call: by rows, block-sparse, or in full. It gets the queries and keys of this
        rank."""
        if call.rule is not None:
            return self._by_rows
        return self._in_full if step.sparse is None else self._sparse

    def attend(self, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the result of `function` for a call whose tokens are all on this rank, computed by the chosen kernel if
        possible."""
        step, by_rows = self.step, kwargs.get("rule") is not None
        if step is None or (step.kernel.kernel.name == SDPA and step.sparse is None and not by_rows):
            return function(*args, **kwargs)
        call = attention_call(function, *args, **kwargs)
        others = call.q_BQHD.shape[2:] != call.v_BKHD.shape[2:]
        if not by_rows and (others or call.mask is not None or call.arguments.get("is_causal")):
            step.kernel.leave(
                call.q_BQHD.dtype, "calls with values of a different head size" if others else "calls with a mask"
            )
            return function(*args, **kwargs)
        gate = None if by_rows else step.take_gate(call.q_BQHD)
        at = LayerCall(call, step, self.kernel_of(call, step), self, gate, Span(0, call.q_BQHD.shape[2]))
        return call.result(at.kernel.attend(at, call.q_BQHD, call.k_BKHD, call.v_BKHD))

    def numbers(self, at: LayerCall, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See TokenNumbers.numbers: all tokens, in the class's order."""
        of_queries, of_keys = (
            kept_numbers(at.step, ("all", length), functools.partial(torch.arange, length)) for length in (queries, keys)
        )
        return of_queries, of_keys

    def places(self, streams: tuple[int, ...]) -> None:
        """See TokenNumbers.places. None, because the tokens are in the class's order."""


def kept_numbers(step: AttentionStep, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Numbers of rows for a rule, [n] int64 in host memory. Calls with the same tokens get the same tensor for a key."""
    key = ROWS, key
    if key not in step.kept:
        step.kept[key] = make()
    return step.kept[key]
