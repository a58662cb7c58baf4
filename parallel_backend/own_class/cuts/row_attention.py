"""Attention in which not every query sees every key, such as in windows, by a rule that goes by the numbers of rows.

A class's form calls `attention_by_rows`. Ranks and bands have some of the rows, in another order, and give the rule their
numbers.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from parallel_backend.own_class.cuts.attention_calls import attend_now
from parallel_backend.own_class.cuts.row_rule import RowRule

KEPT = "parallel_dit_kept"
"""Attribute of a tensor of numbers: see `kept_with`."""
Kept = TypeVar("Kept")


@torch.compiler.disable  # it decides by numbers on the host
def attention_by_rows(rule: RowRule, q_BQHD: torch.Tensor, k_BKHD: torch.Tensor, v_BKHD: torch.Tensor) -> torch.Tensor:
    """[B, Q, H, D]. Ranks cut and exchange the call as they do any other one of attention."""
    tensors = (x.transpose(1, 2) for x in (q_BQHD, k_BKHD, v_BKHD))
    shapes = {"skip_reshape": True, "skip_output_reshape": True}
    return attend_now(attention_rows, *tensors, q_BQHD.shape[2], rule=rule, **shapes).transpose(1, 2)


def attention_rows(
    q_BHQD: torch.Tensor,
    k_BHKD: torch.Tensor,
    v_BHKD: torch.Tensor,
    _heads: int,
    rule: RowRule | None = None,
    scale: float | None = None,
    **_shapes: Any,
) -> torch.Tensor:
    """[B, H, Q, D] of a call with all tokens, in the form of ComfyUI's functions. None: all queries see all keys."""
    if rule is None:
        return F.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKD, scale=scale)

    def attend(q_BqHD: torch.Tensor, k_BkHD: torch.Tensor, v_BkHD: torch.Tensor) -> torch.Tensor:
        q_BHqD, k_BHkD, v_BHkD = (x.transpose(1, 2) for x in (q_BqHD, k_BkHD, v_BkHD))
        return F.scaled_dot_product_attention(q_BHqD, k_BHkD, v_BHkD).transpose(1, 2)

    tensors = [x.transpose(1, 2) for x in (q_BHQD, k_BHKD, v_BHKD)]
    numbers = (torch.arange(x.shape[1]) for x in tensors[:2])
    return rule(attend, *tensors, *numbers).transpose(1, 2)


def kept_with(numbers: torch.Tensor, key: Hashable, make: Callable[[], Kept]) -> Kept:
    """What `make` gives, such as rows by group on a device, kept as long as these numbers are. A rank gives a rule the same
    tensor in all layers, and in all calls that are alike."""
    kept = vars(numbers).setdefault(KEPT, {})
    if key not in kept:
        kept[key] = make()
    return kept[key]
