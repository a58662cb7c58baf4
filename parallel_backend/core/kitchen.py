"""comfy-kitchen, ComfyUI's kernel library: whether it can be used here, and its fused kernels."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

log = logging.getLogger(__name__)

CUDA_TORCH = 13
"""Lowest CUDA version of torch for comfy-kitchen's CUDA kernels. ComfyUI disables them below it."""

Fused = Callable[..., Any]


@dataclass(frozen=True)
class Kitchen:
    """The package's module `tensor`, or None. `word`: why all or some of the package cannot be used; empty if it can."""

    tensors: ModuleType | None
    word: str


@functools.cache
def kitchen() -> Kitchen:
    """comfy-kitchen with the kernels that ComfyUI itself would use."""
    try:
        import comfy_kitchen
        import comfy_kitchen.tensor
    except (ImportError, AttributeError, RuntimeError) as error:  # an old torch lacks names that the package uses
        return Kitchen(None, f"comfy-kitchen cannot be used ({type(error).__name__}: {error})")
    comfy_kitchen.registry.disable("triton")  # as in ComfyUI, unless it is asked for
    if torch.version.cuda is None:
        comfy_kitchen.registry.disable("cuda")
    elif int(torch.version.cuda.split(".")[0]) < CUDA_TORCH:
        comfy_kitchen.registry.disable("cuda")
        return Kitchen(comfy_kitchen.tensor, f"its CUDA kernels need a torch for CUDA {CUDA_TORCH}")
    return Kitchen(comfy_kitchen.tensor, "")


@functools.cache
def fused_kernel(name: str) -> Fused | None:
    """comfy-kitchen's operation `name` on CUDA devices in 16 bits. None: the package has no CUDA kernels, or lacks it."""
    if not _has_cuda_kernels():
        return None
    if getattr(torch.ops.comfy_kitchen, name, None) is None:
        log.info("this comfy-kitchen has no %s", name)
        return None
    return DirectCall(name)


class DirectCall:
    """Calls comfy-kitchen's operation `name` without torch's and its own dispatch, which take the host longer than the
    launch.

    The package chooses an implementation by the shapes of each call. Here that is done once for each form of the arguments.
    """

    FORMS = 64
    """Maximum number of forms of arguments whose implementations are cached. A run has a few for each operation."""

    def __init__(self, name: str):
        import comfy_kitchen

        self._name, self._registry = name, comfy_kitchen.registry
        schema = getattr(torch.ops.comfy_kitchen, name).default._schema
        self._names = [argument.name for argument in schema.arguments]
        self._found: dict[tuple[Any, ...], Fused] = {}

    def __call__(self, *arguments: Any) -> Any:
        form = tuple((each.shape, each.stride()) if isinstance(each, torch.Tensor) else each for each in arguments)
        named = dict(zip(self._names, arguments, strict=False))  # the last ones have defaults
        if (found := self._found.get(form)) is None:
            found = self._registry.get_implementation(self._name, kwargs=named)
            if len(self._found) == self.FORMS:
                self._found.clear()
            self._found[form] = found
        return found(**named)


def _has_cuda_kernels() -> bool:
    if kitchen().tensors is None or kitchen().word:
        return False
    import comfy_kitchen

    return comfy_kitchen.registry.is_available("cuda")
