"""Converts the arguments of a model call to tensors for the ranks, and back.

A call has one latent, one timestep [B], and other arguments by name. Nested latents, such as a video and its audio, are
packed into one row of values. The other arguments are sent as conditioning tensors, batch first.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from parallel_backend.own_class.calls.unproven import Unproven

OPTIONS = "transformer_options"
"""The argument that is a dictionary of numbers, strings, lists and dictionaries. Tensors in it are shared by all batch
entries."""
SIGMAS = "sigmas", "sample_sigmas"
"""Tensors in OPTIONS: the present call's sigma with a row for each batch entry, and all sigmas of the run."""
TIME_DTYPE = "times"
"""Entry of STRUCTURE: name of the timestep's dtype. The class may compute in it, while ranks receive float32."""
LATENT = "latent"
"""Entry of STRUCTURE: channels, (frames,) rows and columns of the whole latent. Empty if there are several latents, or if a
call only determines the number of whole tokens."""
STRUCTURE = "structure"
"""Conditioning tensor [B, n] int32, equal for all batch entries: JSON of all arguments except tensors, see `to_tensors`."""
TENSOR, SHARED, PLAIN, DICT = "tensor", "shared", "plain", "dict"
"""Keys in STRUCTURE: of a tensor with a row for each batch entry, of a tensor that entries share, of OPTIONS, and of another
dictionary."""
LATENTS = "parallel_dit_latents"
"""Argument of a call with nested latents: each latent's shape, without the batch."""
LISTED = "parallel_dit_listed"
"""Argument of a call that passes its only latent in a list."""
TIMES = "parallel_dit_times"
"""Argument of a call with several timesteps, one for each latent. A number: that many timesteps, equal to the call's.

A list of shapes, without the batch: the call's timestep [B, n] has their values side by side. They are not a named argument,
because bands treat arguments that change from step to step as another prompt."""


def to_tensors(arguments: Mapping[str, Any], timestep: torch.Tensor, latent: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """Return a call's arguments as conditioning tensors, and STRUCTURE.

    Values are tensors, None, numbers, strings, and lists and dictionaries of them. Raises ValueError with the argument's
    name for others. `timestep`: [B]; only its dtype is stored. `latent`: see LATENT.
    """
    return tensors_in(arguments, len(timestep)) | {STRUCTURE: _structure(arguments, timestep, latent)}


def tensors_in(arguments: Mapping[str, Any], batch: int) -> dict[str, torch.Tensor]:
    """Return the tensors of `to_tensors` without STRUCTURE."""
    found: dict[str, torch.Tensor] = {}

    def take(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value if _has_rows(name, value, batch) else value.expand(batch, *value.shape)
        elif isinstance(value, dict | list | tuple):
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                take(f"{name}/{key}", each)

    for name, value in arguments.items():
        take(name, value)
    return found


def _has_rows(name: str, value: torch.Tensor, batch: int) -> bool:
    """Whether the tensor has a row for each batch entry."""
    return value.ndim > 0 and len(value) == batch and not name.startswith(f"{OPTIONS}/")


def _structure(arguments: Mapping[str, Any], timestep: torch.Tensor, latent: Sequence[int]) -> torch.Tensor:
    batch = len(timestep)

    def told(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {TENSOR if _has_rows(name, value, batch) else SHARED: name}
        if name == OPTIONS:
            shared = {key: told(f"{name}/{key}", each) for key, each in value.items() if isinstance(each, torch.Tensor)}
            return {PLAIN: {key: each for key, each in value.items() if key not in shared}, DICT: shared}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {DICT: {key: told(f"{name}/{key}", each) for key, each in value.items()}}
        if isinstance(value, list | tuple):
            return [told(f"{name}/{index}", each) for index, each in enumerate(value)]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError(f"model: its call has {name}, a {type(value).__name__}, which cannot be sent to ranks.")

    told_all = {name: told(name, value) for name, value in arguments.items()}
    head = {TIME_DTYPE: str(timestep.dtype).removeprefix("torch."), LATENT: list(latent)}
    structure = json.dumps(head | told_all).encode()
    return torch.tensor(list(structure), dtype=torch.int32).expand(batch, -1).clone()


def structure_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the decoded STRUCTURE."""
    return json.loads(bytes(tensors[STRUCTURE][0].tolist()))


def from_tensors(tensors: Mapping[str, torch.Tensor], structure: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inverse of `to_tensors`, for the batch entries in `tensors`. `structure`: from `structure_of`."""

    def value(stored: Any) -> Any:
        if isinstance(stored, list):
            return [value(each) for each in stored]
        if not isinstance(stored, dict):
            return stored
        if DICT in stored:
            return anew(stored.get(PLAIN, {})) | {key: value(each) for key, each in stored[DICT].items()}
        return tensors[stored[TENSOR]] if TENSOR in stored else tensors[stored[SHARED]][0]

    return {name: value(stored) for name, stored in structure.items() if name not in (TIME_DTYPE, LATENT)}


def anew(value: Any) -> Any:
    """Return the value with other dictionaries and lists, because classes write into them. Tensors are the same."""
    if isinstance(value, dict):
        return {name: anew(each) for name, each in value.items()}
    return [anew(each) for each in value] if isinstance(value, list) else value


def timestep_of(times: torch.Tensor, structure: Mapping[str, Any]) -> torch.Tensor:
    """Return the timestep in the dtype that the class expects."""
    return times.to(getattr(torch, structure[TIME_DTYPE]))


def in_form(
    x: torch.Tensor | Sequence[torch.Tensor], timestep: torch.Tensor | Sequence[torch.Tensor], axes: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return (one latent with `axes` axes, one timestep, named arguments that tell the original form: LATENTS, LISTED and
    TIMES)."""
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
    """Return timesteps [B, ...] side by side: [B, n]."""
    return torch.cat([each.reshape(len(each), -1) for each in times], dim=1)


def apart(timestep: torch.Tensor, told: int | Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
    """Return the inverse of `joined`: a timestep for each latent. `told`: see TIMES."""
    if isinstance(told, int):
        return (timestep,) * told
    parts = timestep.split([math.prod(shape) for shape in told], dim=1)
    return tuple(part.reshape(len(part), *shape) for part, shape in zip(parts, told, strict=True))


def run_call(model: Callable[..., Any], x: torch.Tensor, timestep: torch.Tensor, named: Mapping[str, Any]) -> Any:
    """Call the model and return its output in the same form as `x`. None: the model is a stage that is not the last one."""
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
    """Return latents [B, C, ...] as one tensor [B, 1, ..., 1, N] with `axes` axes."""
    rows = torch.cat([latent.flatten(1) for latent in latents], dim=1)
    return rows.reshape(len(rows), *(1,) * (axes - 2), -1)


def unpack(x: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the inverse of `pack`."""
    parts = x.flatten(1).split([math.prod(shape) for shape in shapes], dim=1)
    return [part.reshape(len(x), *shape) for part, shape in zip(parts, shapes, strict=True)]
