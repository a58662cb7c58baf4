"""One byte for each value on its way between ranks: what Ulysses sends over slow links.

Every group of up to 32 neighbouring values of a head is divided by a scale of its own. The mean of the keys over the tokens,
which SageAttention (arXiv 2410.02367) takes off first, stays: with it off, keys of the mini model were no closer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parallel_backend.core.packed_values import group_size

from .collectives import Exchange, start_all_to_all
from .mesh import Axis
from .transfers import Traffic

KINDS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""What a value becomes, and the largest."""

SCALE = torch.bfloat16
UP = 1 + 2**-8
"""More than what rounding to SCALE can take off, so that no value is beyond the largest."""

SMALLEST = 1e-30
"""Scale of a group of zeros."""

PIECE = 1 << 17
"""Values that a CPU packs at once: those in its cache. New memory for all of them took it longer than the arithmetic."""


@dataclass(frozen=True)
class Codec:
    """`kind`: one of KINDS. A part is kept as its scales, then its values."""

    kind: str

    def start_all_to_all(
        self, size: int, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis, traffic: Traffic
    ) -> "PackedExchange":
        """As collectives.start_all_to_all, for values of heads of `size`. What a rank keeps for itself is as it was."""
        own = axis.index
        sent, received = ([self.nbytes(n, size) for n in counts] for counts in (send, receive))
        sent[own] = received[own] = 0
        packed = torch.empty(sum(sent), dtype=torch.uint8, device=x.device)
        for index, (part, place) in enumerate(zip(x.split(list(send)), packed.split(sent), strict=True)):
            if index != own:
                self.encode(part, size, place)
        kept = x.split(list(send))[own]
        return PackedExchange(
            self, size, start_all_to_all(packed, sent, received, axis, traffic), kept, receive, received, own
        )

    def nbytes(self, values: int, size: int) -> int:
        """Of so many values, packed. Even: the next part begins with a scale."""
        count = values + values // group_size(size) * SCALE.itemsize
        return count + count % 2

    def encode(self, values: torch.Tensor, size: int, packed: torch.Tensor) -> None:
        """[n] of heads of `size`, floating -> written into [nbytes] uint8."""
        kind, largest = KINDS[self.kind]
        groups = values.view(-1, group_size(size))
        scales, codes = self._views(packed, len(values), len(groups))
        peaks = torch.maximum(groups.amax(1), groups.amin(1).neg_()).float()
        scales.copy_(peaks.mul_(UP / largest).clamp_min_(SMALLEST))
        factors, codes = scales.float().reciprocal_()[:, None], codes.view(kind).view_as(groups)
        count = len(groups) if groups.is_cuda else PIECE // groups.shape[1]
        work = torch.empty(min(count, len(groups)), groups.shape[1], device=groups.device)
        for start in range(0, len(groups), max(1, count)):
            rows = slice(start, start + count)
            scaled = torch.mul(groups[rows], factors[rows], out=work[: len(groups[rows])])
            codes[rows] = scaled.round_() if kind == torch.int8 else scaled

    def decode(self, packed: torch.Tensor, size: int, values: torch.Tensor) -> None:
        """[nbytes] uint8 -> written into [n]."""
        groups = values.view(-1, group_size(size))
        scales, codes = self._views(packed, len(values), len(groups))
        groups.copy_(codes.view(KINDS[self.kind][0]).view_as(groups)).mul_(scales[:, None])

    @staticmethod
    def _views(packed: torch.Tensor, values: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
        head = groups * SCALE.itemsize
        return packed[:head].view(SCALE), packed[head : head + values]


@dataclass(frozen=True)
class PackedExchange:
    """As collectives.Exchange. `kept`: the part of rank `own`, itself; `receive`, `received`: values and bytes by rank."""

    codec: Codec
    size: int
    exchange: Exchange
    kept: torch.Tensor
    receive: Sequence[int]
    received: Sequence[int]
    own: int

    def wait(self) -> torch.Tensor:
        packed, out = self.exchange.wait(), self.kept.new_empty(sum(self.receive))
        parts = zip(packed.split(list(self.received)), out.split(list(self.receive)), strict=True)
        for index, (place, part) in enumerate(parts):
            if index != self.own:
                self.codec.decode(place, self.size, part)
            else:
                part.copy_(self.kept)
        return out


def codec_for(transfer_dtype: str) -> Codec | None:
    """None for 'full'. With 'residual' what Ulysses sends is in int8: it is no change of something that both ends hold."""
    if transfer_dtype == "full":
        return None
    return Codec("int8" if transfer_dtype == "residual" else transfer_dtype)
