"""The transfers between ranks of one mesh axis: short functions, shapes before and after in the docstring, every byte
counted (transfers.py). Each is called by all ranks of the axis, in the same order.

Where two ranks send to each other, receives are started first. Gloo tells the sender on the same connection that its
receiver is ready: behind a tensor that is on its way, that comes when the tensor is through, and the two directions of the
link work one after the other instead of at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .mesh import Axis
from .staging import from_staging, host_buffer, staged, to_staging
from .transfers import Traffic, Transfer

Parts = Iterable[tuple[int, torch.Tensor]]
"""(index of the other rank on the axis, tensor)."""


def _start_swap(receives: Parts, sends: Parts, axis: Axis, traffic: Traffic) -> Transfer | None:
    """Start sending and receiving tensors, empty ones left out; None where all are. Bytes sent are counted."""
    sends = [(index, part) for index, part in sends if part.numel()]
    operations = [dist.P2POp(dist.irecv, part, axis.ranks[index], axis.group) for index, part in receives if part.numel()]
    operations += [dist.P2POp(dist.isend, part, axis.ranks[index], axis.group) for index, part in sends]
    traffic.bytes_sent[axis.name] += sum(part.nbytes for _, part in sends)
    return traffic.start(lambda: dist.batch_isend_irecv(operations)) if operations else None


@dataclass
class Exchange:
    """An all-to-all under way. `wait` gives what came for this rank, [sum(receive)]."""

    source: torch.Tensor  # kept alive
    target: torch.Tensor
    device: torch.device
    transfer: Transfer | None

    def wait(self) -> torch.Tensor:
        if self.transfer is not None:
            self.transfer.wait()
        return from_staging(self.target, self.device)


def start_all_to_all(x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis, traffic: Traffic) -> Exchange:
    """[sum(send)] -> [sum(receive)]: send[i] values go to rank i of the axis, receive[i] values come from it.

    Gloo's own all-to-all begins to send first: between two ranks on a slow link it takes nearly twice as long as receives
    and sends do. Within a machine it takes less of the cores.
    """
    on_host = staged(x, axis.group)
    source = to_staging(x) if on_host else x
    target = host_buffer((sum(receive),), x.dtype, x.device) if on_host else x.new_empty(sum(receive))
    if target.is_cuda or not axis.far:
        traffic.bytes_sent[axis.name] += (sum(send) - send[axis.index]) * x.element_size()
        transfer = traffic.start(
            lambda: dist.all_to_all_single(target, source, list(receive), list(send), group=axis.group, async_op=True)
        )
        return Exchange(source, target, x.device, transfer)
    leaving, coming = source.split(list(send)), target.split(list(receive))
    coming[axis.index].copy_(leaving[axis.index])
    # In turns, so that no rank has two others send to it at once.
    others = [(axis.index + turn) % axis.size for turn in range(1, axis.size)]
    sends = [(index, leaving[index]) for index in others]
    receives = [(index, coming[index]) for index in reversed(others)]
    return Exchange(source, target, x.device, _start_swap(receives, sends, axis, traffic))


def all_reduce(x: torch.Tensor, axis: Axis, traffic: Traffic) -> torch.Tensor:
    """Sum over the axis, same shape on every rank, in place where it can be.

    Counted as the ring algorithm moves it: every rank sends 2 (N - 1) / N of the tensor.
    """
    traffic.bytes_sent[axis.name] += 2 * (axis.size - 1) * x.nbytes // axis.size
    x = x.contiguous()
    target = to_staging(x) if staged(x, axis.group) else x
    traffic.start(lambda: dist.all_reduce(target, group=axis.group, async_op=True)).wait()
    return target if target is x else x.copy_(target)


@dataclass
class Gathering:
    """An all-gather under way: `wait` gives every rank's part, by index on the axis."""

    parts: list[torch.Tensor]
    device: torch.device
    transfer: Transfer | None

    def wait_pending(self) -> None:
        """Wait until nothing is under way any more."""
        if self.transfer is not None:
            self.transfer.wait()
            self.transfer = None

    def wait(self) -> list[torch.Tensor]:
        self.wait_pending()
        return [from_staging(part, self.device) for part in self.parts]


def start_gather(own: torch.Tensor, lengths: Sequence[int], dim: int, axis: Axis, traffic: Traffic) -> Gathering:
    """Start gathering parts that differ in their size along `dim`, which is lengths[i] for rank i of the axis.

    Straight from each rank to each other rank, so that parts may be of any size, also empty. The result keeps the
    parts apart: whoever wants them in one tensor knows best where.
    """
    own = own.contiguous()
    on_host = staged(own, axis.group)
    source = to_staging(own) if on_host else own
    parts = []
    for index, length in enumerate(lengths):
        if index == axis.index:
            parts.append(own)
            continue
        shape = list(own.shape)
        shape[dim] = length
        parts.append(host_buffer(shape, own.dtype, own.device) if on_host else own.new_empty(shape))
    others = [index for index in range(len(lengths)) if index != axis.index]
    receives, sends = [(index, parts[index]) for index in others], [(index, source) for index in others]
    transfer = _start_swap(receives, sends, axis, traffic)
    return Gathering(parts, own.device, transfer)


@dataclass
class Shift:
    """One step around the axis under way: `wait` gives what the rank before sent."""

    sent: torch.Tensor
    received: torch.Tensor
    device: torch.device
    transfer: Transfer | None

    def wait(self) -> torch.Tensor:
        if self.transfer is not None:
            self.transfer.wait()
            self.transfer = None
        return from_staging(self.received, self.device)


def start_shift(x: torch.Tensor, length: int, dim: int, axis: Axis, traffic: Traffic) -> Shift:
    """Start sending x to the next rank of the axis, and receiving from the one before a tensor with `length` along `dim`."""
    x = x.contiguous()
    on_host = staged(x, axis.group)
    source = to_staging(x) if on_host else x
    shape = list(x.shape)
    shape[dim] = length
    received = host_buffer(shape, x.dtype, x.device) if on_host else x.new_empty(shape)
    before, behind = (axis.index - 1) % axis.size, (axis.index + 1) % axis.size
    transfer = _start_swap([(before, received)], [(behind, source)], axis, traffic)
    return Shift(source, received, x.device, transfer)
