"""What changed since the last call, in a few bits a value: what displaced patches send of their keys and values.

After CompactFusion (arXiv 2507.17511). Sender and receivers hold the same reconstruction of the sender's values. A call
sends the present values' difference from it, rounded, and all of them add what was sent. So what rounding left is in the
difference of the next call (error feedback), and errors do not add up. Every group of up to 32 neighbouring values of a
head has a step of its own.
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
"""Values that are packed at once: those in a CPU's cache; so many on a GPU that what is computed on the way takes 50 MB."""


@dataclass(frozen=True)
class ChangeCodec:
    """`bits`: of a value, a whole number of which a byte has. A part is kept as the steps of its groups, then its values,
    the first in the lowest bits of a byte.

    Arithmetic is such that all devices come to the same bits: one rounding for each of multiply and add.
    """

    bits: int

    def nbytes(self, values: int, size: int) -> int:
        """Of so many values of heads of `size`, packed."""
        return change_bytes(values, size, self.bits)

    def encode(self, values: torch.Tensor, held: torch.Tensor, size: int) -> torch.Tensor:
        """Difference of `values` from `held`, both [n] and floating, of heads of `size` -> [nbytes] uint8."""
        group, count = group_size(size), len(values)
        packed = torch.empty(self.nbytes(count, size), dtype=torch.uint8, device=values.device)
        steps, codes = self._views(packed, count // group)
        values, held, largest = values.view(-1, group), held.view(-1, group), 2**self.bits - 1
        for rows in self._pieces(values):
            change = values[rows].float() - held[rows].float()
            steps[rows] = self._steps(change)
            change.div_(steps[rows].float().clamp_min_(SMALLEST)[:, None])
            levels = change.floor_().add_((largest + 1) // 2).clamp_(0, largest).to(torch.uint8)
            self._pack(levels.view(-1), codes[self._bytes_before(rows.start, group) :])
        return packed

    def add(self, packed: torch.Tensor, held: torch.Tensor, size: int) -> None:
        """Add what was sent, [nbytes] uint8, to `held` [n]."""
        group = group_size(size)
        steps, codes = self._views(packed, held.numel() // group)
        held = held.view(-1, group)
        for rows in self._pieces(held):
            part = held[rows]
            levels = self._unpack(codes[self._bytes_before(rows.start, group) :], part.numel()).view_as(part)
            part.add_(levels.float().sub_((2**self.bits - 1) / 2).mul_(steps[rows].float()[:, None]))

    def _steps(self, change: torch.Tensor) -> torch.Tensor:
        """Distances between neighbouring levels, [G, g] -> [G]. The largest change is half a step from a level: what was cut
        off would be missing from the next call's keys, moved on along the line as they are.
        """
        return change.abs().amax(1).mul_(UP * 2 / 2**self.bits)

    def _pieces(self, groups: torch.Tensor) -> list[slice]:
        """Rows that are taken at once. A piece of 8 rows or more of them ends with a whole byte."""
        count = PIECES[groups.device.type] // groups.shape[1] // 8 * 8
        return [slice(start, min(start + count, len(groups))) for start in range(0, len(groups), count)]

    def _bytes_before(self, row: int, group: int) -> int:
        return row * group * self.bits // 8

    def _pack(self, levels: torch.Tensor, codes: torch.Tensor) -> None:
        each = 8 // self.bits
        levels = torch.nn.functional.pad(levels, (0, -len(levels) % each)).view(-1, each)
        codes = codes[: len(levels)].copy_(levels[:, 0])
        for place in range(1, each):
            codes.bitwise_or_(levels[:, place] << place * self.bits)

    def _unpack(self, codes: torch.Tensor, count: int) -> torch.Tensor:
        each, largest = 8 // self.bits, 2**self.bits - 1
        codes = codes[: -(-count // each)]
        return torch.stack([codes >> place * self.bits & largest for place in range(each)], dim=1).view(-1)[:count]

    @staticmethod
    def _views(packed: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
        return packed[: groups * SCALE.itemsize].view(SCALE), packed[groups * SCALE.itemsize :]


@dataclass
class Held:
    """What the ranks of an axis hold of each other's values, the same on all of them bit for bit. It starts with exact ones.

    `parts`: by index on the axis, each [..., D] and contiguous. They change with every gather.
    """

    codec: ChangeCodec
    parts: list[torch.Tensor]

    def fits(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether it is of parts of these shapes. All ranks of the axis come to the same answer."""
        return [tuple(part.shape) for part in self.parts] == list(shapes)

    def start_gather(self, own: torch.Tensor, axis: Axis, traffic: Traffic) -> "ChangeGathering":
        """Start to send what changed in `own`, and to receive what changed elsewhere."""
        mine, size = self.parts[axis.index], own.shape[-1]
        packed = self.codec.encode(own.view(-1), mine.view(-1), size)
        self.codec.add(packed, mine.view(-1), size)
        lengths = [self.codec.nbytes(part.numel(), size) for part in self.parts]
        return ChangeGathering(self, start_gather(packed, lengths, 0, axis, traffic), axis.index)


@dataclass
class ChangeGathering:
    """As collectives.Gathering. Each is waited for once, in the order in which they were started."""

    held: Held
    gathering: Gathering
    own: int

    def wait_pending(self) -> None:
        """Wait until nothing is under way any more."""
        self.gathering.wait_pending()

    def wait(self) -> list[torch.Tensor]:
        """Every rank's part as of this gather. The rank's own may be further: what it started to send since is in it."""
        for index, packed in enumerate(self.gathering.wait()):
            if index != self.own and len(packed):
                part = self.held.parts[index]
                self.held.codec.add(packed, part.view(-1), part.shape[-1])
        return self.held.parts


def changes_for(transfer_dtype: str) -> ChangeCodec | None:
    """None for all but 'residual'."""
    bits = change_bits(transfer_dtype)
    return ChangeCodec(bits) if bits else None
