"""Exchanges the halo, the rows next to a band. Each rank of the axis has one band of rows, or columns, in rank order."""

from dataclasses import dataclass

import torch

from parallel_backend.rank.comm.collectives import start_swap
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.staging import from_staging, receivable, sendable
from parallel_backend.rank.comm.transfers import Traffic, Transfer


@dataclass
class Halo:
    """An exchange in progress."""

    sent: list[torch.Tensor]  # kept alive until the transfer is over
    received: list[torch.Tensor | None]
    device: torch.device
    transfer: Transfer | None

    def wait(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the rows before and after the band. None at the image's edge, or if no rows were requested."""
        if self.transfer is not None:
            self.transfer.wait()
        before, behind = (part if part is None else from_staging(part, self.device) for part in self.received)
        return before, behind


def start_halo(x: torch.Tensor, dim: int, before: int, behind: int, axis: Axis, traffic: Traffic) -> Halo:
    """Start the exchange of rows with both neighbours. Collective over the axis.

    Receives the last `before` rows of the previous band and the first `behind` rows of the next band. Sends this band's rows
    to the neighbours likewise. Rows are counted along `dim`.
    """
    length = x.shape[dim]
    assert length >= max(before, behind), f"a band of {length} rows has fewer than its neighbours need"
    received: list[torch.Tensor | None] = [None, None]
    sends, receives = [], []
    # The neighbour before needs this band's first rows as its rows behind, and the other way round.
    sides = ((axis.index - 1, (0, behind), before), (axis.index + 1, (length - before, before), behind))
    for side, (index, rows, wanted) in enumerate(sides):
        if 0 <= index < axis.size:
            sends.append((index, sendable(x.narrow(dim, *rows).contiguous(), axis.group)))
            if wanted:
                shape = list(x.shape)
                shape[dim] = wanted
                received[side] = buffer = receivable(shape, x, axis.group)
                receives.append((index, buffer))
    return Halo([part for _, part in sends], received, x.device, start_swap(receives, sends, axis, traffic))
