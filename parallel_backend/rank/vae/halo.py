"""Exchange of the rows next to a band. Each rank of the axis has one band of the picture's rows, in rank order."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.staging import from_staging, host_buffer, staged, to_staging
from parallel_backend.rank.comm.transfers import Traffic, Transfer


@dataclass
class Halo:
    """An exchange under way. `wait` returns the rows above and below the band, [B, C, 1, W] each.

    They are zero beyond the picture's edge, as a convolution's padding.
    """

    sent: tuple[torch.Tensor, torch.Tensor]
    received: tuple[torch.Tensor, torch.Tensor]
    device: torch.device
    transfer: Transfer

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.transfer.wait()
        above, below = self.received
        return from_staging(above, self.device), from_staging(below, self.device)


def start_halo(x: torch.Tensor, axis: Axis, traffic: Traffic) -> Halo:
    """Start sending the first and the last row of x [B, C, rows, W] to the ranks before and after, and receiving theirs."""
    sent = x[:, :, :1].contiguous(), x[:, :, -1:].contiguous()
    if staged(x, axis.group):
        received = tuple(host_buffer(row.shape, row.dtype, row.device).zero_() for row in sent)
        sent = to_staging(sent[0]), to_staging(sent[1])
    else:
        received = torch.zeros_like(sent[0]), torch.zeros_like(sent[1])
    operations = []
    for own, other, index in zip(sent, received, (axis.index - 1, axis.index + 1), strict=True):
        if 0 <= index < axis.size:
            operations.append(dist.P2POp(dist.isend, own, axis.ranks[index], axis.group))
            operations.append(dist.P2POp(dist.irecv, other, axis.ranks[index], axis.group))
            traffic.bytes_sent[axis.name] += own.nbytes
    return Halo(sent, received, x.device, traffic.start(lambda: dist.batch_isend_irecv(operations)))
