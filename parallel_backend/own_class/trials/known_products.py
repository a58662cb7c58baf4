"""Products of a trial's linear layers, which are most of its seconds, are computed once for the same values."""

from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

KEPT = 8
"""Maximum number of inputs that are kept for a layer."""
MOST_BYTES = 1 << 30
"""Of inputs and products that are kept. All are dropped if there are more."""


class KnownProducts(TorchFunctionMode):
    """Context in which a layer that gets the same input again, bit by bit, returns the output of before.

    Runs of a trial have most of their inputs in common: a stage those of the whole model, and bands those of the text. A
    weight that is written to has no known product any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakTensorKeyDictionary()
        self._bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or kwargs or torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        known = self._known.setdefault(weight, deque())
        for version, of_bias, given, out in known:
            if version == weight._version and of_bias is bias and given.shape == x.shape and torch.equal(given, x):
                return out.clone()
        out = func(*args)
        if len(known) == KEPT:
            self._bytes -= _nbytes(*known.popleft()[2:])
        self._bytes += _nbytes(x, out)
        if self._bytes > MOST_BYTES:
            self._known.clear()
            self._bytes = 0
        else:
            known.append((weight._version, bias, x.clone(), out.clone()))
        return out


def _nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)
