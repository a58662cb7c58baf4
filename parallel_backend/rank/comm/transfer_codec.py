"""Packs values that Ulysses sends over slow links into one byte each.

Every group of up to 32 neighbouring values of a head is divided by its own scale. SageAttention (arXiv 2410.02367) first
subtracts the mean of the keys over the tokens. This codec does not: keys of the mini model were no closer with it. Letters
of shapes: rank/attention.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallel_backend.core.packed_values import group_size

from .collectives import start_all_to_all
from .mesh import Axis
from .transfers import Traffic

KINDS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Setting -> (dtype of a packed value, its largest value)."""

SCALE = torch.bfloat16
UP = 1 + 2**-8
"""Factor on scales, more than rounding to SCALE takes off them, so that no packed value exceeds the largest."""

SMALLEST = 1e-30
"""Scale of a group of zeros."""

PIECE = 1 << 17
"""Number of values that a CPU packs at once: as many as fit its cache. Memory for all at once took longer than the
arithmetic."""


@dataclass(frozen=True)
class Codec:
    """Packs a part as its scales, followed by its values. `kind`: one of KINDS."""

    kind: str

    def start_all_to_all(
        self, size: int, x_N: torch.Tensor, send: list[int], receive: list[int], axis: Axis, traffic: Traffic
    ) -> Callable[[], torch.Tensor]:
        """Start collectives.start_all_to_all with packed values. Returns a function that waits and returns the unpacked
        values [sum(receive)]. `size`: number of values of a head. A rank's part for itself is not packed."""
        sent, received = ([self.nbytes(n, size) for n in counts] for counts in (send, receive))
        sent[axis.index] = received[axis.index] = 0
        packed_Y = torch.empty(sum(sent), dtype=torch.uint8, device=x_N.device)
        parts_n = x_N.split(send)
        for index, (part_n, packed_y) in enumerate(zip(parts_n, packed_Y.split(sent), strict=True)):
            if index != axis.index:
                self.encode(part_n, size, packed_y)
        exchange = start_all_to_all(packed_Y, sent, received, axis, traffic)

        def finish() -> torch.Tensor:
            packed_Y, out_N = exchange.wait(), x_N.new_empty(sum(receive))
            parts = zip(packed_Y.split(received), out_N.split(receive), strict=True)
            for index, (packed_y, out_n) in enumerate(parts):
                if index != axis.index:
                    self.decode(packed_y, size, out_n)
                else:
                    out_n.copy_(parts_n[index])
            return out_N

        return finish

    def nbytes(self, values: int, size: int) -> int:
        """Return the bytes of `values` packed values. It is even, because the next part begins with a scale of two bytes."""
        count = values + values // group_size(size) * SCALE.itemsize
        return count + count % 2

    def encode(self, values_n: torch.Tensor, size: int, packed_y: torch.Tensor) -> None:
        """Pack floats, with heads of `size` values, into `packed_y`, uint8."""
        kind, largest = KINDS[self.kind]
        values_Gg = values_n.view(-1, group_size(size))
        scales_G, codes_n = self._views(packed_y, len(values_n), len(values_Gg))
        peaks_G = torch.maximum(values_Gg.amax(1), values_Gg.amin(1).neg_()).float()
        scales_G.copy_(peaks_G.mul_(UP / largest).clamp_min_(SMALLEST))
        # Divided by the scales as they are sent, rounded to SCALE: the receiver multiplies by those.
        factors_G1, codes_Gg = scales_G.float().reciprocal_()[:, None], codes_n.view(kind).view_as(values_Gg)
        count = len(values_Gg) if values_Gg.is_cuda else PIECE // values_Gg.shape[1]
        work_Gg = torch.empty(min(count, len(values_Gg)), values_Gg.shape[1], device=values_Gg.device)
        for start in range(0, len(values_Gg), max(1, count)):
            rows = slice(start, start + count)
            scaled_Gg = torch.mul(values_Gg[rows], factors_G1[rows], out=work_Gg[: len(values_Gg[rows])])
            codes_Gg[rows] = scaled_Gg.round_() if kind == torch.int8 else scaled_Gg

    def decode(self, packed_y: torch.Tensor, size: int, values_n: torch.Tensor) -> None:
        """Unpack `packed_y`, uint8, into `values_n`."""
        values_Gg = values_n.view(-1, group_size(size))
        scales_G, codes_n = self._views(packed_y, len(values_n), len(values_Gg))
        values_Gg.copy_(codes_n.view(KINDS[self.kind][0]).view_as(values_Gg)).mul_(scales_G[:, None])

    @staticmethod
    def _views(packed_y: torch.Tensor, values: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale_bytes = groups * SCALE.itemsize
        return packed_y[:scale_bytes].view(SCALE), packed_y[scale_bytes : scale_bytes + values]


def codec_for(transfer_dtype: str) -> Codec | None:
    """The codec for a setting; None for 'full'. 'residual' gets int8, because Ulysses' receivers hold no earlier values."""
    if transfer_dtype == "full":
        return None
    return Codec("int8" if transfer_dtype == "residual" else transfer_dtype)
