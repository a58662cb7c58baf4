"""What a call of ComfyUI's own class is to a trial: what it can hold, and which calls are alike."""

from collections.abc import Sequence
from typing import Any

import torch

from parallel_backend.families.own_class.call_arguments import OPTIONS, STRUCTURE
from parallel_backend.families.own_class.call_form import LATENTS, TIMES
from parallel_backend.families.own_class.tried_calls import Call, numbers_of

from .reach import is_plain


def is_held(value: Any) -> bool:
    """Whether a trial can hold the value: a tensor, or what JSON has."""
    return isinstance(value, torch.Tensor) or is_plain(value)


def on_host(values: Any) -> dict[str, Any]:
    """The values with their tensors in host memory."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, dict(values))


def shapes(tensors: dict[str, torch.Tensor]) -> Any:
    """Names and shapes of a call's conditioning tensors, whatever the batch."""
    return frozenset((name, tuple(tensor.shape[1:])) for name, tensor in tensors.items() if name != STRUCTURE)


def structure(call: Call, sizes: tuple[int, ...]) -> str:
    """What a trial is for: names and axes of the tensors, the batch, and what is no tensor and no number. `sizes`: of the
    whole latent, of which a single frame is another thing than several.

    Of dtypes those of times and whole numbers: other values are drawn in float32, whatever theirs is.
    """
    numbers = numbers_of(call)

    def shown(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            is_any = value.is_floating_point() and not name.startswith(TIMES)
            return "floats" if is_any else str(value.dtype), value.ndim
        if name == LATENTS:
            return [len(shape) for shape in value]
        if isinstance(value, dict) and name != OPTIONS:
            return {key: shown(f"{name}/{key}", each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [shown(f"{name}/", each) for each in value]
        return type(value) if name in numbers else repr(value)

    named = {name: shown(name, value) for name, value in call.named.items()}
    single = [size == 1 for size in sizes]
    return repr((len(call.x), single, call.timestep.dtype, named, sorted(map(str, call.options))))


def near(times: Sequence[float]) -> list[float]:
    """Times of a trial that are as good as these: the first of them, and of the others the nearest tenth of it. A shift of
    the sigmas, which depends on the picture's size, moves the last one a little."""
    return [round(times[0], 3), *(round(time / times[0], 1) for time in times[1:])] if times else []
