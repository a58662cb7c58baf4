"""Arguments of a model call <-> conditioning tensors, which are batch first."""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

OPTIONS = "transformer_options"
"""The argument that is a dictionary, of numbers, words, and lists and dictionaries of them. Tensors in it are shared."""
SIGMAS = "sigmas", "sample_sigmas"
"""Tensors in OPTIONS: the call's sigma, a row for each entry, and all sigmas of the run."""
TIMES = "times"
"""Entry of STRUCTURE: name of the timestep's dtype. A class may compute in it, and the ranks get float32."""
LATENT = "latent"
"""Entry of STRUCTURE: the whole latent's channels, (frames,) rows and columns. Empty: there are several latents, or a call
tells only how many whole tokens there are."""
STRUCTURE = "structure"
"""Conditioning tensor [B, n] int32, the same for all entries: JSON of everything that is no tensor, see `to_tensors`."""
TENSOR, SHARED, PLAIN, DICT = "tensor", "shared", "plain", "dict"
"""Keys in STRUCTURE of a tensor with a row for each batch entry, of one that all entries share, of OPTIONS, and of another
dictionary."""


def to_tensors(arguments: Mapping[str, Any], timestep: torch.Tensor, latent: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """Values are tensors, None, numbers, words, and lists and dictionaries of them. ValueError, with the name, for others.

    `timestep`: [B], which is sent apart. `latent`: see LATENT.
    """
    return tensors_in(arguments, len(timestep)) | {STRUCTURE: _structure(arguments, timestep, latent)}


def tensors_in(arguments: Mapping[str, Any], batch: int) -> dict[str, torch.Tensor]:
    """What `to_tensors` gives without STRUCTURE."""
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
    head = {TIMES: str(timestep.dtype).removeprefix("torch."), LATENT: list(latent)}
    structure = json.dumps(head | told_all).encode()
    return torch.tensor(list(structure), dtype=torch.int32).expand(batch, -1).clone()


def structure_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """STRUCTURE, read."""
    return json.loads(bytes(tensors[STRUCTURE][0].tolist()))


def from_tensors(tensors: Mapping[str, torch.Tensor], structure: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `to_tensors`, for the batch entries that the tensors have. `structure`: see `structure_of`."""

    def value(stored: Any) -> Any:
        if isinstance(stored, list):
            return [value(each) for each in stored]
        if not isinstance(stored, dict):
            return stored
        if DICT in stored:  # classes write into the options
            return copy.deepcopy(stored.get(PLAIN, {})) | {key: value(each) for key, each in stored[DICT].items()}
        return tensors[stored[TENSOR]] if TENSOR in stored else tensors[stored[SHARED]][0]

    return {name: value(stored) for name, stored in structure.items() if name not in (TIMES, LATENT)}


def timestep_of(times: torch.Tensor, structure: Mapping[str, Any]) -> torch.Tensor:
    """The timestep in its own dtype."""
    return times.to(getattr(torch, structure[TIMES]))
