"""One call of a rank: what it sends and receives, and how it stands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .rules import SHORT, RuleBroken, as_bytes

Tensors = Mapping[int, Sequence[torch.Tensor]]
"""By global rank of the peer."""

Size = tuple[int, torch.dtype]


@dataclass(frozen=True)
class Communicator:
    """`group`: number of the process group. `linked`: it is the one of two ranks for calls outside of a batch."""

    group: int
    ranks: tuple[int, ...]
    linked: bool

    def __str__(self) -> str:
        return f"{'link' if self.linked else 'communicator'} {'-'.join(map(str, self.ranks))} of group {self.group}"


class Connection(NamedTuple):
    """`peer`: rank at the other end of a transfer, None for what all of the communicator's ranks do together."""

    what: str
    peer: int | None

    def __str__(self) -> str:
        return self.what if self.peer is None else f"{self.what} {self.peer}"


@dataclass(eq=False)
class Operation:
    """`number`: of the rank's operations, in order of issue. `ready`: when it may start, by time.monotonic.

    `in_place`: what it sends is also where its result goes. `peers`: the ranks that have a part in it, itself included
    where it sends to itself.
    """

    kind: str
    rank: int
    communicator: Communicator
    number: int
    place: str
    ready: float
    sends: Tensors
    receives: Tensors
    peers: frozenset[int]
    in_place: torch.Tensor | None = None
    launched: bool = False
    waited: bool = False
    partners: dict[int, "Operation"] = field(default_factory=dict)
    came: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(where it belongs, what came), to be put there by the wait."""

    def __post_init__(self):
        self.unmoved = set(self.peers)
        self._as_called: list[tuple[torch.Tensor, torch.Tensor]] = [
            (tensor, as_bytes(tensor).clone()) for tensors in self.sends.values() for tensor in tensors
        ]

    def __str__(self) -> str:
        return f"rank {self.rank}'s {self.words()} on {self.communicator} at {self.place}"

    @property
    def done(self) -> bool:
        return self.launched and not self.unmoved

    def words(self) -> str:
        sent, received = (sorted({peer for peer in tensors if tensors[peer]}) for tensors in (self.sends, self.receives))
        if sent != received or self.kind == "batch":
            parts = [f"{verb} {', '.join(map(str, ranks))}" for verb, ranks in (("to", sent), ("from", received)) if ranks]
            return f"{self.kind} {' and '.join(parts)}"
        return self.kind

    @property
    def connections(self) -> list[Connection]:
        """What NCCL connects for at the operation, if it is the first such one of the rank on the communicator."""
        if self.kind == "barrier":  # which is a sum of one number
            return [Connection("a short sum", None)]
        if self.kind == "all-reduce":
            assert self.in_place is not None
            return [Connection("a short sum" if self.in_place.nbytes <= SHORT else "a long sum", None)]
        both = (("to", self.sends), ("from", self.receives))
        return [
            Connection(f"{self.kind} {verb}", peer)
            for verb, tensors in both
            for peer, parts in tensors.items()
            if peer != self.rank and any(part.numel() for part in parts)
        ]

    def sizes(self, peer: int) -> tuple[list[Size], list[Size]]:
        """What goes to a peer and what comes from it: (bytes, dtype) of each tensor."""
        return tuple([(t.nbytes, t.dtype) for t in tensors.get(peer, ())] for tensors in (self.sends, self.receives))

    def check_against(self, other: "Operation") -> None:
        """RuleBroken unless this is what `other` answers: as many operations of the pair came before each."""
        (ours, expected), (theirs, wanted) = self.sizes(other.rank), other.sizes(self.rank)
        both = f"{self}, but {other}"
        if self.kind != other.kind or (len(ours), len(expected)) != (len(wanted), len(theirs)):
            raise RuleBroken(f"the order of issue differs between ranks: {both}")
        for one, two in ((ours, wanted), (theirs, expected)):
            for (size, dtype), (other_size, other_dtype) in zip(one, two, strict=True):
                if dtype != other_dtype:
                    raise RuleBroken(f"dtypes differ, {dtype} is sent where {other_dtype} belongs: {both}")
                if size != other_size:
                    raise RuleBroken(f"sizes differ, {size} bytes are sent where {other_size} belong: {both}")

    def check_unchanged(self) -> None:
        """RuleBroken if the host has written what it sends since the call."""
        for tensor, before in self._as_called:
            if not torch.equal(as_bytes(tensor), before):
                raise RuleBroken(f"what is sent was changed before the operation was waited for: {self}")

    def forget_sent(self) -> None:
        """From now on it may change."""
        self._as_called.clear()
