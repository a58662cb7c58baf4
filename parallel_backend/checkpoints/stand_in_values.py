"""A class on meta tensors: built without first values, and run on where its forward asks for values, which are ones then."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

ASKS = frozenset(("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"))
"""Methods of a tensor that need its values, or bring them into host memory."""


class StandInValues(TorchFunctionMode):
    """A context of this thread. A meta tensor whose values are asked for is one of ones. What was made from such values lies
    in host memory; where it meets meta tensors it becomes one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ASKS or (name == "to" and "cpu" in [str(each) for each in (*args[1:], *kwargs.values())]):
            return func(_ones(args[0]), *args[1:], **kwargs)
        if name == "bincount":  # its size depends on values: of zeros
            return torch.full((1,), args[0].numel(), device="cpu")
        if not all(tensor.is_meta for tensor in tensors):
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return func(*args, **kwargs)


class NoFirstValues(TorchFunctionMode):
    """A context of this thread, in which torch.nn.init leaves tensors as they are: on meta tensors it takes a third of the
    time in which a class is built."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _ones(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
