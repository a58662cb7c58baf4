"""Exchange of what lies next to a band. Each rank of the axis has one band of rows, or columns, in rank order."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.staging import from_staging, host_buffer, staged, to_staging
from parallel_backend.rank.comm.transfers import Traffic, Transfer


@dataclass
class Halo:
    """An exchange under way. `wait` returns what lies before and behind the band; None beyond the picture's edge, or where
    nothing was asked for."""

    sent: list[torch.Tensor]  # kept alive
    received: list[torch.Tensor | None]
    device: torch.device
    transfer: Transfer | None

    def wait(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.transfer is not None:
            self.transfer.wait()
        before, behind = (part if part is None else from_staging(part, self.device) for part in self.received)
        return before, behind


def start_halo(x: torch.Tensor, dim: int, before: int, behind: int, axis: Axis, traffic: Traffic) -> Halo:
    """Start receiving the last `before` rows of the band before x, and the first `behind` rows of the one behind it, and
    sending likewise. Rows are counted along `dim`; the band of each rank has as many as its neighbours need."""
    length, on_host = x.shape[dim], staged(x, axis.group)
    assert length >= max(before, behind), f"a band of {length} rows has fewer than its neighbours need"
    sent, received, operations = [], [None, None], []
    for side, index in enumerate((axis.index - 1, axis.index + 1)):
        own, other = ((0, behind), before) if side == 0 else ((length - before, before), behind)
        if not 0 <= index < axis.size:
            continue
        if own[1]:
            part = x.narrow(dim, *own).contiguous()
            sent.append(to_staging(part) if on_host else part)
            operations.append(dist.P2POp(dist.isend, sent[-1], axis.ranks[index], axis.group))
            traffic.bytes_sent[axis.name] += part.nbytes
        if other:
            shape = list(x.shape)
            shape[dim] = other
            received[side] = host_buffer(shape, x.dtype, x.device) if on_host else x.new_empty(shape)
            operations.append(dist.P2POp(dist.irecv, received[side], axis.ranks[index], axis.group))
    transfer = traffic.start(lambda: dist.batch_isend_irecv(operations)) if operations else None
    return Halo(sent, received, x.device, transfer)
