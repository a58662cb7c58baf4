"""The form of a call on its way to ranks and in a trial: one latent, one timestep [B], and the other arguments by name.

Nested latents, such as a video and its sound, are packed into one row of values.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from parallel_backend.own_class.calls.unproven import Unproven

LATENTS = "parallel_dit_latents"
"""Argument of a call with nested latents: the shape of each, without the batch."""
LISTED = "parallel_dit_listed"
"""Argument of a call whose one latent is in a list."""
TIMES = "parallel_dit_times"
"""Argument of a call with several timesteps, one for each latent. A number: all so many are the call's timestep. Shapes,
without the batch: the call's timestep [B, n] has their values side by side, since what differs from step to step is another
prompt to bands."""


def in_form(
    x: torch.Tensor | Sequence[torch.Tensor], timestep: torch.Tensor | Sequence[torch.Tensor], axes: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(latent of so many axes, timestep, arguments that say what they were made of)."""
    told: dict[str, Any] = {}
    if not isinstance(x, torch.Tensor) and len(x) == 1:
        told[LISTED], x = True, x[0]
    elif not isinstance(x, torch.Tensor):
        told[LATENTS] = [list(latent.shape[1:]) for latent in x]
        x = pack(x, axes)
    if not isinstance(timestep, torch.Tensor):
        first = timestep[0]
        alike = first.ndim == 1 and all(each is first or torch.equal(each, first) for each in timestep)
        told[TIMES] = len(timestep) if alike else [list(each.shape[1:]) for each in timestep]
        timestep = first if alike else joined(timestep)
    return x, timestep, told


def joined(times: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B, ...] each -> [B, n]"""
    return torch.cat([each.reshape(len(each), -1) for each in times], dim=1)


def apart(timestep: torch.Tensor, told: int | Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
    """The timesteps that `timestep` stands for. `told`: see TIMES."""
    if isinstance(told, int):
        return (timestep,) * told
    parts = timestep.split([math.prod(shape) for shape in told], dim=1)
    return tuple(part.reshape(len(part), *shape) for part, shape in zip(parts, told, strict=True))


def run(model: Callable[..., Any], x: torch.Tensor, timestep: torch.Tensor, named: Mapping[str, Any]) -> Any:
    """The model's output for a call in this form, in it too. None: the model is a stage that is not the last one."""
    named = dict(named)
    shapes, times, is_listed = named.pop(LATENTS, None), named.pop(TIMES, None), named.pop(LISTED, False)
    of_latents = timestep if times is None else apart(timestep, times)
    given = [x] if is_listed else x if shapes is None else unpack(x, shapes)
    out = model(given, of_latents, **named)
    if shapes is None or out is None:
        return out[0] if isinstance(out, list) and is_listed else out
    latents = [out] if isinstance(out, torch.Tensor) else list(out)
    if [list(latent.shape[1:]) for latent in latents] != shapes:
        raise Unproven("it returns other latents than it gets")
    return pack(latents, x.ndim)


def pack(latents: Sequence[torch.Tensor], axes: int) -> torch.Tensor:
    """[B, C, ...] each -> [B, 1, ..., 1, N]"""
    rows = torch.cat([latent.flatten(1) for latent in latents], dim=1)
    return rows.reshape(len(rows), *(1,) * (axes - 2), -1)


def unpack(x: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The inverse of `pack`."""
    parts = x.flatten(1).split([math.prod(shape) for shape in shapes], dim=1)
    return [part.reshape(len(x), *shape) for part, shape in zip(parts, shapes, strict=True)]
