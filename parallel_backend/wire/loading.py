"""Messages that load a model and its LoRA on the ranks."""

from dataclasses import dataclass

import torch

from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Span


@dataclass(frozen=True)
class Load:
    """Client -> rank: load the rank's part of a model. Models that the rank has already stay loaded. Sent to all ranks of
    the pool. Ranks without a part of the model help to create its process groups, and send no answer."""

    setup: Setup
    stage_blocks: tuple[Span, ...]
    """Range of the blocks of each pipeline stage. Blocks are numbered through all block lists."""
    patch_shares: tuple[float, ...]
    """For each patch rank, its fraction of the tokens."""
    fingerprint: str = ""
    """Expected Checkpoint.fingerprint. Empty: the file is on the client's machine."""
    resident: tuple[int, ...] = ()
    """For each rank, the maximum bytes of weights on its device, slots included (rank/stage/store/). Other weights are
    streamed from host memory. Ranks with the same weights have the same limit. Empty: no limit."""
    ranks: tuple[int, ...] = ()
    """The pool's ranks that have the model, ascending. They are the model's ranks 0, 1, ... Empty: all ranks."""
    threads: int = 0
    """CPU threads of each rank of the model. 0: the number with which the rank was started."""
    file_state: str = ""
    """Expected Checkpoint.file_state. Empty: the file is on other machines."""


@dataclass(frozen=True)
class Loading:
    """Rank -> client: progress of loading, sent about a hundred times."""

    rank: int
    fraction: float
    """The fraction of the bytes of the rank's weights that is loaded."""


@dataclass(frozen=True)
class Loaded:
    """Rank -> client: the model is loaded."""

    rank: int
    weight_bytes: int
    """Bytes of the rank's weights on its device, slots included."""
    parameters: tuple[str, ...]
    """Names of the rank's parameters."""
    host_bytes: int = 0
    """Bytes of the rank's weights in host memory, including weights shared with other ranks."""


@dataclass(frozen=True)
class SetResident:
    """Client -> rank: limit the bytes of weights on the device from now on. Answered by Residency.

    The rank moves complete blocks, and as few as possible. Limit 0 moves all weights to host memory, including those outside
    of blocks; then no micro-step may follow before another SetResident. Merged weights stay if host memory has no room for
    them.
    """

    resident: tuple[int, ...]
    """The limit of each rank, as Load.resident."""


@dataclass(frozen=True)
class Residency:
    """Rank -> client: how many bytes of the rank's weights are on the device and in host memory."""

    rank: int
    device_bytes: int
    """See Loaded.weight_bytes."""
    host_bytes: int
    """See Loaded.host_bytes. Weights on the device may also have a copy in host memory."""


@dataclass(frozen=True)
class DropAdapters:
    """Client -> rank: undo every Adapt, so that the weights are those of the checkpoint again."""


@dataclass(frozen=True)
class Adapt:
    """Client -> rank: add `scale` * `up` [out, r] @ `down` [r, in] to one parameter of the rank; earlier additions stay. If
    `down` is None, `up` has the parameter's shape. Both are for the complete parameter; the rank uses its shard of them."""

    parameter: str
    up: torch.Tensor
    down: torch.Tensor | None
    scale: float
    group: int = 0
    """The group whose strength (see Weigh) scales this addition. Group 0 always has strength 1."""
    instead: bool = False
    """Whether `up` replaces the checkpoint's value of the parameter. Such a message comes before all additions to it."""


@dataclass(frozen=True)
class Weigh:
    """Client -> rank: the strengths of groups 1, 2, ... from now on. A group without a strength adds nothing."""

    strengths: tuple[float, ...]


@dataclass(frozen=True)
class AdaptersSent:
    """Client -> rank: answer with Adapted once every earlier Adapt and Weigh is done."""


@dataclass(frozen=True)
class Adapted:
    """Rank -> client: the adapters are applied. They take `adapter_bytes` bytes on this rank."""

    rank: int
    adapter_bytes: int
    host_bytes: int
    """See Loaded.host_bytes. Merging gives this rank its own copy of weights that are in host memory."""
