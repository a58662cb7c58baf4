"""Messages that bring a model and its LoRA onto the ranks."""

from dataclasses import dataclass

import torch

from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Span


@dataclass(frozen=True)
class Load:
    """Client -> rank: load the rank's part of a model. Models that the rank has stay.

    Sent to all ranks of the pool: those without a part of the model take part in making its process groups, and answer
    nothing.
    """

    setup: Setup
    stage_blocks: tuple[Span, ...]
    """Blocks of each stage, numbered through all block lists."""
    patch_shares: tuple[float, ...]
    """Each patch rank's share of the tokens."""
    fingerprint: str = ""
    """Expected Checkpoint.fingerprint. Empty: the file is on the client's machine."""
    resident: tuple[int, ...] = ()
    """By rank, limit of the bytes of weights on its device, slots included (rank/stage/store/). Other weights are streamed
    from host memory. Equal for ranks with the same weights. Empty: no limit."""
    ranks: tuple[int, ...] = ()
    """The pool's ranks that have the model, ascending: the model's ranks 0, 1, ... Empty: all."""
    threads: int = 0
    """CPU threads of each of them. 0: those of its start."""
    file_state: str = ""
    """Expected Checkpoint.file_state. Empty: the file is on other machines."""


@dataclass(frozen=True)
class Loading:
    """Rank -> client, about a hundred times while it loads."""

    rank: int
    fraction: float
    """Share of the rank's weights, by bytes, that is loaded."""


@dataclass(frozen=True)
class Loaded:
    """Rank -> client: the model is loaded."""

    rank: int
    weight_bytes: int
    """Bytes of the rank's weights on its device, slots included."""
    parameters: tuple[str, ...]
    """Names of the rank's parameters."""
    host_bytes: int = 0
    """Bytes of the rank's weights in host memory, whether shared with other ranks or not."""


@dataclass(frozen=True)
class SetResident:
    """Client -> rank: limit the bytes of weights on the device from now on. Answered by Residency.

    Blocks move whole, and as few as possible. Limit 0 moves all weights to host memory, those outside of blocks too: no
    micro-step may follow before another SetResident. Merged weights stay if host memory has no room for them.
    """

    resident: tuple[int, ...]
    """By rank, as Load.resident."""


@dataclass(frozen=True)
class Residency:
    """Rank -> client: where the rank's weights are."""

    rank: int
    device_bytes: int
    """As Loaded.weight_bytes."""
    host_bytes: int
    """As Loaded.host_bytes. Weights on the device may have a copy in host memory."""


@dataclass(frozen=True)
class DropAdapters:
    """Client -> rank: undo every Adapt, so that the weights are the checkpoint's again."""


@dataclass(frozen=True)
class Adapt:
    """Client -> rank: add `scale` * `up` [out, r] @ `down` [r, in] to one of the rank's parameters; earlier ones stay.

    Without `down`, `up` has the parameter's shape. Both are for the whole parameter; the rank takes its shard.
    """

    parameter: str
    up: torch.Tensor
    down: torch.Tensor | None
    scale: float
    group: int = 0
    """The group of Weigh whose strength scales this addition. Group 0 has strength 1 always."""
    instead: bool = False
    """`up` replaces the checkpoint's value of the parameter. Sent before all additions to this parameter."""


@dataclass(frozen=True)
class Rescale:
    """Client -> rank: new scales of every Adapt, in order. Groups other than 0 take them with the next Weigh."""

    scales: tuple[float, ...]


@dataclass(frozen=True)
class Weigh:
    """Client -> rank: strengths of the groups 1, 2, ... from now on. A group without a strength adds nothing."""

    strengths: tuple[float, ...]


@dataclass(frozen=True)
class AdaptersSent:
    """Client -> rank: answer Adapted once every earlier Adapt, Rescale and Weigh is done."""


@dataclass(frozen=True)
class Adapted:
    """Rank -> client: adapters are in place, with `adapter_bytes` bytes on this rank."""

    rank: int
    adapter_bytes: int
    host_bytes: int
    """As Loaded.host_bytes. A merge gives weights that are in host memory a copy for this rank alone."""
