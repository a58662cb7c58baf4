"""Messages that bring a model and its LoRA onto the ranks."""

from dataclasses import dataclass

import torch

from parallel_backend.core.spans import Span


@dataclass(frozen=True)
class Load:
    """Client -> rank: load the rank's own part of a model; replaces whatever model the rank held.

    `degrees`: the mesh sizes. `patch_shares`: each patch rank's share of the tokens. `stage_blocks`: per stage, the span
    of blocks it owns (all block lists counted through). `only`: for a rehearsal, "<list>.<index>" of the blocks that are
    there; the others hand on what they are given, and RunStats say what these cost. Empty: all. `compile`: see
    compile.py. `transfer_dtype`: one of degrees.TRANSFER_DTYPES. `fingerprint`: what the files must have, see
    fingerprint.py; empty where they are this machine's own.
    """

    path: str
    dtype: str
    degrees: tuple[int, ...]
    patch_mode: str
    patch_shares: tuple[float, ...]
    stage_blocks: tuple[Span, ...]
    attention: str
    only: tuple[str, ...] = ()
    compile: bool = False
    transfer_dtype: str = "full"
    fingerprint: str = ""


@dataclass(frozen=True)
class Loading:
    """Rank -> client, for every percent while it loads: the share of its weights, in bytes, that are in place."""

    rank: int
    fraction: float


@dataclass(frozen=True)
class Loaded:
    """Rank -> client: the model is in place; `weight_bytes` is what this rank holds of it, `parameters` are their names."""

    rank: int
    weight_bytes: int
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class DropAdapters:
    """Client -> rank: the model's weights count as they are in the checkpoint again."""


@dataclass(frozen=True)
class Adapt:
    """Client -> rank: add `scale` * `up` [out, r] @ `down` [r, in] to one of the rank's parameters, beside what is there.

    Without `down`, `up` has the parameter's shape. Both are whole: the rank takes its shard of them.
    """

    parameter: str
    up: torch.Tensor
    down: torch.Tensor | None
    scale: float


@dataclass(frozen=True)
class Rescale:
    """Client -> rank: other scales for the factors of every Adapt since the last DropAdapters, in order."""

    scales: tuple[float, ...]


@dataclass(frozen=True)
class AdaptersSent:
    """Client -> rank: say when all that was sent is in place."""


@dataclass(frozen=True)
class Adapted:
    """Rank -> client: the adapters are in place and take `adapter_bytes` on this rank."""

    rank: int
    adapter_bytes: int
