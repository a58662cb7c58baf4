"""Attention of a class's own functions (own_class/cuts/attention_calls.py) inside compiled blocks: one operation."""

from typing import Any

import torch

from parallel_backend.own_class.cuts.attention_calls import replacement_of, trace_attention_by


@torch.library.custom_op(
    "parallel_dit::attend_by_class",
    mutates_args=("order",),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor(a!) order, str function, int heads, bool skip_reshape, "
    "bool skip_output_reshape, str[] names, float[] values) -> Tensor",
)
def attend_by_class(q, k, v, mask, order, function, heads, skip_reshape, skip_output_reshape, names, values):
    """A call with ComfyUI's signature. `function`: name of the replacement. `names`, `values`: of other arguments."""
    others = dict(zip(names, values, strict=True))
    shapes = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    return replacement_of(function)(q, k, v, heads, mask=mask, **shapes, **others).contiguous()


@attend_by_class.register_fake
def _(q, k, v, mask, order, function, heads, skip_reshape, skip_output_reshape, names, values):
    batch, tokens, features = (q.shape[0], q.shape[2], q.shape[1] * v.shape[3]) if skip_reshape else q.flatten(2).shape
    out = q.new_empty(batch, tokens, features)
    return out.unflatten(2, (heads, -1)).transpose(1, 2).contiguous() if skip_output_reshape else out


def trace_attention(order: torch.Tensor) -> None:
    """Have code that is compiled call attention as one operation, which declares to write to `order`.

    ComfyUI's options are left out: ranks get none that attention reads.
    """

    def traced(
        function: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        transformer_options: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        given = {name: value for name, value in others.items() if value is not None}
        if attn_precision is not None or not all(isinstance(value, bool | int | float) for value in given.values()):
            return _apart(function, q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **others)
        names, values = list(given), [float(value) for value in given.values()]
        shapes = skip_reshape, skip_output_reshape
        return torch.ops.parallel_dit.attend_by_class(q, k, v, mask, order, function, heads, *shapes, names, values)

    trace_attention_by(traced)


@torch.compiler.disable
def _apart(function: str, *args: Any, **others: Any) -> torch.Tensor:
    """Between two graphs, since its arguments are none of an operation."""
    return replacement_of(function)(*args, **others)
