"""Messages that bring a model and its LoRA onto the ranks."""

from dataclasses import dataclass

import torch

from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Span


@dataclass(frozen=True)
class Load:
    """Client -> rank: load the rank's part of a model, beside the models that the rank has."""

    setup: Setup
    stage_blocks: tuple[Span, ...]
    """By stage, the blocks that it owns. Blocks are numbered through all block lists."""
    patch_shares: tuple[float, ...]
    """Share of the tokens by patch rank."""
    only: tuple[str, ...] = ()
    """"<list>.<index>" of the blocks to load, for a rehearsal. Other blocks hand on what they are given. RunStats then has
    the costs of these blocks. Empty: all blocks."""
    fingerprint: str = ""
    """That the files must have, see checkpoints/fingerprint.py. Empty: the files are on the client's machine."""
    resident: tuple[int, ...] = ()
    """By rank, most bytes of weights on its device, slots included (rank/stage/store/). The rest is in host memory and comes
    to the device block by block. Ranks with the same weights get the same number. Empty: all is on the device."""
    file_state: str = ""
    """That the files must be in, see checkpoints/file_state.py. Empty: they are on other machines."""


@dataclass(frozen=True)
class Loading:
    """Rank -> client, about a hundred times while it loads."""

    rank: int
    fraction: float
    """Share of the rank's weights, by bytes, that are in place."""


@dataclass(frozen=True)
class Loaded:
    """Rank -> client: the model is in place."""

    rank: int
    weight_bytes: int
    """Bytes of this rank's weights that are on its device, slots included."""
    parameters: tuple[str, ...]
    """Names of this rank's parameters."""
    host_bytes: int = 0
    """Bytes of this rank's weights that are in host memory, whether shared with other ranks or not."""


@dataclass(frozen=True)
class SetResident:
    """Client -> rank: from now on at most so many bytes of weights are on the device. Answered by Residency.

    Blocks move whole, and no more of them than needed. 0: everything is in host memory, the weights outside of blocks too;
    no micro-step may come until another SetResident has brought them back. Merged weights for which host memory has no room
    stay on the device in any case.
    """

    resident: tuple[int, ...]
    """By rank, as Load.resident."""
    working: bool = True
    """False: the model is not about to compute. Nothing is streamed, so that no slots are kept, and nothing comes to the
    device; where weights have left it no micro-step may come until they are back."""


@dataclass(frozen=True)
class Residency:
    """Rank -> client: where its weights are."""

    rank: int
    device_bytes: int
    """As Loaded.weight_bytes."""
    host_bytes: int
    """As Loaded.host_bytes. Weights may have a copy in host memory while they are on the device."""


@dataclass(frozen=True)
class DropAdapters:
    """Client -> rank: remove all that Adapt added. The weights are the checkpoint's again."""


@dataclass(frozen=True)
class Adapt:
    """Client -> rank: add `scale` * `up` [out, r] @ `down` [r, in] to one of the rank's parameters, beside earlier ones.

    Without `down`, `up` has the parameter's shape. Both are of the whole parameter: the rank takes its shard.
    """

    parameter: str
    up: torch.Tensor
    down: torch.Tensor | None
    scale: float
    group: int = 0
    """Which of Weigh's strengths it counts by. Group 0 counts in full always."""
    instead: bool = False
    """`up` is the parameter's whole value, in place of the checkpoint's. Before anything else for this parameter."""


@dataclass(frozen=True)
class Rescale:
    """Client -> rank: new scales of every Adapt since the last DropAdapters, in order. Groups wait for the next Weigh."""

    scales: tuple[float, ...]


@dataclass(frozen=True)
class Weigh:
    """Client -> rank: strengths of the groups 1, 2, ... from now on. A group that has not been told of counts nothing."""

    strengths: tuple[float, ...]


@dataclass(frozen=True)
class AdaptersSent:
    """Client -> rank: answer Adapted once every Adapt, Rescale and Weigh so far is in place."""


@dataclass(frozen=True)
class Adapted:
    """Rank -> client: adapters are in place. They take `adapter_bytes` on this rank."""

    rank: int
    adapter_bytes: int
