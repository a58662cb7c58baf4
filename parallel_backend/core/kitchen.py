"""comfy-kitchen, ComfyUI's kernel library: whether it can be used here, and which of its fused kernels work on a device."""

import functools
import logging
from collections.abc import Callable, Sequence
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
    """The package's module `tensor`, or None. `word`: the reason why all or some of the package cannot be used."""

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
def fused_kernel(name: str, dtype: torch.dtype, device: torch.device) -> Fused | None:
    """comfy-kitchen's operation `name`, a key of TRIALS, in a 16-bit `dtype` on a CUDA device. None where the package has no
    CUDA kernels, lacks the operation, or fails a trial.

    The first call for a device makes the host wait for it.
    """
    if not _has_cuda_kernels():
        return None
    operation = getattr(torch.ops.comfy_kitchen, name, None)
    if operation is None:
        log.info("this comfy-kitchen has no %s", name)
        return None
    kernel = DirectCall(name)
    with torch.inference_mode():
        arguments = TRIALS[name](dtype)
        try:
            on_device = [_on(device, each) for each in arguments]
            found, expected = kernel(*on_device), operation(*arguments)
            if name in IN_PLACE:
                found, expected = on_device[:2], arguments[:2]
            same = all(
                torch.allclose(one.float(), other.to(device).float(), atol=TOLERANCE, rtol=TOLERANCE)
                for one, other in zip(_tensors(found), _tensors(expected), strict=True)
            )
        except (RuntimeError, TypeError, NotImplementedError) as error:
            log.warning("comfy-kitchen's %s fails here: %s", name, error)
            return None
    if not same:
        log.warning("comfy-kitchen's %s gives different values here and on the CPU", name)
        return None
    return kernel


class DirectCall:
    """comfy-kitchen's operation `name`, without torch's and its own dispatch, which cost more of the host than the launch.

    The package chooses its implementation by the shapes of each call. Here it is asked once for each form.
    """

    FORMS = 64
    """Forms of arguments whose implementations are kept. A run has a few for each operation."""

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


def try_kernels(dtype: torch.dtype, device: torch.device) -> None:
    """Have the fused kernels tried now, so that no micro-step waits for a trial."""
    if device.type == "cuda" and dtype.itemsize == 2:
        for name in TRIALS:
            fused_kernel(name, dtype, device)


def _has_cuda_kernels() -> bool:
    if kitchen().tensors is None or kitchen().word:
        return False
    import comfy_kitchen

    return comfy_kitchen.registry.is_available("cuda")


TOLERANCE = 0.05
"""Tolerance for a trial's values, which are about 1: several roundings of bf16."""

ROWS, HEADS, SIZE = 3, 2, 64


def _heads(dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(-2, 2, ROWS * HEADS * SIZE, dtype=dtype).view(1, ROWS, HEADS, SIZE)


def _turns(heads: int = 1, size: int = SIZE) -> torch.Tensor:
    angles = torch.linspace(0, 3, ROWS * heads * size // 2).view(1, ROWS, heads, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))


def _rotation(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return _heads(dtype), _heads(dtype).flip(0), _turns()


def _rotation_by_head(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return _heads(dtype), _turns(HEADS)


def _normed_rotation(dtype: torch.dtype) -> tuple[Any, ...]:
    weight = torch.linspace(0.5, 1.5, SIZE, dtype=dtype)
    return _heads(dtype), _heads(dtype).flip(1), _turns(), weight, weight.flip(0), 1e-6


def _partial_rotation(dtype: torch.dtype) -> tuple[Any, ...]:
    weight = torch.linspace(0.5, 1.5, SIZE, dtype=dtype)
    return _heads(dtype), _heads(dtype).flip(1), _turns(size=SIZE // 2), weight, weight.flip(0), 1e-6, SIZE // 2


def _modulation(dtype: torch.dtype) -> tuple[Any, ...]:
    scale = torch.linspace(-0.5, 0.5, SIZE, dtype=dtype).view(1, 1, SIZE)
    return _heads(dtype).flatten(1, 2), scale, scale.flip(2), 1e-6


TRIALS: dict[str, Callable[[torch.dtype], tuple[Any, ...]]] = {
    "apply_rope": _rotation,
    "apply_rope1": lambda dtype: (_heads(dtype), _turns()),
    "apply_rope_split_half": _rotation,
    "apply_rope_split_half1": _rotation_by_head,
    "rms_rope": _normed_rotation,
    "rms_rope_split_half_": _partial_rotation,
    "adaln": _modulation,
    "rms_adaln": _modulation,
}
"""Operation -> arguments of a trial."""
IN_PLACE = ("rms_rope_split_half_",)
"""Functions that write into their first two arguments."""


def _on(device: torch.device, value: Any) -> Any:
    """A copy, which an operation may write into."""
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def _tensors(found: Any) -> Sequence[torch.Tensor]:
    return found if isinstance(found, (tuple, list)) else (found,)
