"""Calls of attention of ComfyUI's own class by the kernel that the user or a node has chosen, or block-sparse.

Without either, the function computes that the class calls, which is torch's on ranks.
"""

from collections.abc import Callable
from typing import Any

import torch

from parallel_backend.core.attention_kernels import SDPA
from parallel_backend.families.own_class.attention_calls import AttentionCall, attention_call

from .context import AttentionContext
from .sparse import Layout

QUANTISES = "low_precision_attention"
"""Argument of ComfyUI's functions. False: this call is to be computed without quantised queries and keys."""


class OwnKernels:
    """`running()`: name of the block that runs; empty outside of blocks."""

    def __init__(self, context: AttentionContext, running: Callable[[], str]):
        self._context, self._running = context, running

    def attend(self, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """A call of `function` with all tokens that it is over. Returns what the function would."""
        kernel, step = self._context.kernel, self._context.step
        if kernel.kernel.name == SDPA and (step is None or step.sparse is None):
            return function(*args, **kwargs)
        call = attention_call(function, *args, **kwargs)
        others = call.q_BQHD.shape[2:] != call.v_BKHD.shape[2:]
        if others or call.mask is not None or call.arguments.get("is_causal"):
            kernel.leave(call.q_BQHD.dtype, "calls with values of another size" if others else "calls with a mask")
            return function(*args, **kwargs)
        gate = self._context.take_gate(call.q_BQHD)
        return call.result(self.compute(call, call.q_BQHD, call.k_BKHD, call.v_BKHD, None, gate_BQhD=gate))

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
