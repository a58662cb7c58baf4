"""Packs the changes of keys and values since the last call into a few bits a value, for displaced patches.

After CompactFusion (arXiv 2507.17511). Sender and receivers hold the same reconstruction of the sender's values. A call
sends the rounded difference between the present values and the reconstruction, and all ranks add it. The rounding error is
then part of the next call's difference (error feedback), so errors do not add up. Every group of up to 32 neighbouring
values of a head has its own step size. Letters of shapes: rank/attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parallel_backend.core.packed_values import change_bits, change_bytes, group_size

from .collectives import Gathering, start_gather
from .mesh import Axis
from .transfer_codec import SCALE, SMALLEST, UP
from .transfers import Traffic

PIECES = {"cpu": 1 << 17, "cuda": 1 << 22}
"""Values packed at once, by device: as many as fit a CPU's cache; on a GPU, as many as need 50 MB of temporary tensors."""


@dataclass(frozen=True)
class ChangeCodec:
    """Packs a part as the step sizes of its groups, followed by its values, the first in the lowest bits of a byte.

    All devices must compute the same bits, because reconstructions of different ranks must never differ. So every
    multiplication and addition is an operation of its own: no device can fuse two into one with a single rounding.
    """

    bits: int
    """Bits of a value; a divisor of 8."""

    def nbytes(self, values: int, size: int) -> int:
        """Return the bytes of `values` packed values. `size`: values of a head."""
        return change_bytes(values, size, self.bits)

    def encode(self, values_N: torch.Tensor, held_N: torch.Tensor, size: int) -> torch.Tensor:
        """Return the packed difference of `values_N` from `held_N`, [Y] uint8. Both are floats. `size`: values of a head."""
        group, count = group_size(size), len(values_N)
        packed_Y = torch.empty(self.nbytes(count, size), dtype=torch.uint8, device=values_N.device)
        steps_G, codes_y = self._views(packed_Y, count // group)
        values_Gg, held_Gg, largest = values_N.view(-1, group), held_N.view(-1, group), 2**self.bits - 1
        for rows in self._pieces(values_Gg):
            change_Gg = values_Gg[rows].float() - held_Gg[rows].float()
            steps_G[rows] = self._steps(change_Gg)
            # By the step as it is sent, rounded to SCALE: the receivers multiply by that one.
            change_Gg.div_(steps_G[rows].float().clamp_min_(SMALLEST)[:, None])
            levels_Gg = change_Gg.floor_().add_((largest + 1) // 2).clamp_(0, largest).to(torch.uint8)
            self._pack(levels_Gg.view(-1), codes_y[self._bytes_before(rows.start, group) :])
        return packed_Y

    def add(self, packed_Y: torch.Tensor, held_N: torch.Tensor, size: int) -> None:
        """Add the changes in `packed_Y`, uint8, to `held_N`."""
        group = group_size(size)
        steps_G, codes_y = self._views(packed_Y, held_N.numel() // group)
        held_Gg = held_N.view(-1, group)
        for rows in self._pieces(held_Gg):
            part_Gg = held_Gg[rows]
            levels_Gg = self._unpack(codes_y[self._bytes_before(rows.start, group) :], part_Gg.numel()).view_as(part_Gg)
            part_Gg.add_(levels_Gg.float().sub_((2**self.bits - 1) / 2).mul_(steps_G[rows].float()[:, None]))

    def _steps(self, change_Gg: torch.Tensor) -> torch.Tensor:
        """Return the distance between neighbouring levels for each group, [G]."""
        # The largest change is half a step from a level, so nothing is cut off: receivers would extrapolate keys that lack
        # the rest before the next call sends it.
        return change_Gg.abs().amax(1).mul_(UP * 2 / 2**self.bits)

    def _pieces(self, values_Gg: torch.Tensor) -> list[slice]:
        """Return slices of groups that are packed at once, in multiples of 8 groups, so that each ends with a whole byte."""
        groups, group = values_Gg.shape
        count = PIECES[values_Gg.device.type] // group // 8 * 8
        return [slice(start, min(start + count, groups)) for start in range(0, groups, count)]

    def _bytes_before(self, row: int, group: int) -> int:
        return row * group * self.bits // 8

    def _pack(self, levels_n: torch.Tensor, codes_y: torch.Tensor) -> None:
        each = 8 // self.bits
        levels_ye = torch.nn.functional.pad(levels_n, (0, -len(levels_n) % each)).view(-1, each)
        codes_y = codes_y[: len(levels_ye)].copy_(levels_ye[:, 0])
        for index in range(1, each):
            codes_y.bitwise_or_(levels_ye[:, index] << index * self.bits)

    def _unpack(self, codes_y: torch.Tensor, count: int) -> torch.Tensor:
        """Return the first `count` levels, [n]."""
        each, largest = 8 // self.bits, 2**self.bits - 1
        codes_y = codes_y[: -(-count // each)]
        return torch.stack([codes_y >> index * self.bits & largest for index in range(each)], dim=1).view(-1)[:count]

    @staticmethod
    def _views(packed_Y: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
        return packed_Y[: groups * SCALE.itemsize].view(SCALE), packed_Y[groups * SCALE.itemsize :]


@dataclass
class Held:
    """The reconstructed values of all ranks of an axis, bitwise the same on every rank. They start as exact copies; each
    gather adds the encoded changes to them. `parts`: by index on the axis, each [..., D] and contiguous."""

    codec: ChangeCodec
    parts: list[torch.Tensor]

    def fits(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether the parts have these shapes. All ranks of the axis get the same answer."""
        return [tuple(part.shape) for part in self.parts] == list(shapes)

    def start_gather(self, values: torch.Tensor, axis: Axis, traffic: Traffic) -> "ChangeGathering":
        """Start to send the changes of this rank's `values` [..., D], and to receive those of the other ranks."""
        local, size = self.parts[axis.index], values.shape[-1]
        packed_y = self.codec.encode(values.view(-1), local.view(-1), size)
        # The sender adds what it sends, rounded as the receivers get it, so that all reconstructions stay the same.
        self.codec.add(packed_y, local.view(-1), size)
        lengths = [self.codec.nbytes(part.numel(), size) for part in self.parts]
        return ChangeGathering(self, start_gather(packed_y, lengths, 0, axis, traffic), axis.index)


@dataclass
class ChangeGathering:
    """Like collectives.Gathering. Each must be waited for once, in the order in which gatherings were started."""

    held: Held
    gathering: Gathering
    index: int
    """This rank's index on the axis."""

    def wait_pending(self) -> None:
        """Wait until the transfer has ended."""
        self.gathering.wait_pending()

    def wait(self) -> list[torch.Tensor]:
        """Return every rank's part after this gather. This rank's own part also has the changes of later gathers."""
        for index, packed_y in enumerate(self.gathering.wait()):
            if index != self.index and len(packed_y):
                part = self.held.parts[index]
                self.held.codec.add(packed_y, part.view(-1), part.shape[-1])
        return self.held.parts


def changes_for(transfer_dtype: str) -> ChangeCodec | None:
    """Return the codec for 'residual'. None for other settings."""
    bits = change_bits(transfer_dtype)
    return ChangeCodec(bits) if bits else None
