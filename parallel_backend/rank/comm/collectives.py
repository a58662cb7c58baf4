"""Transfers between the ranks of one mesh axis. All bytes are counted (transfers.py).

All ranks of the axis call each function, and all functions in the same order: NCCL and Gloo pair the transfers of two ranks
by the order in which they are issued. The group's own methods take half the host's time of torch.distributed's functions.
Letters of shapes: rank/attention; tensors without a suffix may have any shape.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .mesh import Axis
from .staging import from_staging, receivable, sendable
from .transfers import Traffic, Transfer

ALL_TO_ALL = "all_to_all_single" if hasattr(dist.ProcessGroup, "all_to_all_single") else "alltoall_base"
"""Name of a group's method, which torch 2.13 has changed."""

Parts = Iterable[tuple[int, torch.Tensor]]
"""(index of the other rank on the axis, tensor)."""


def start_swap(receives: Parts, sends: Parts, axis: Axis, traffic: Traffic) -> Transfer | None:
    """Start sending and receiving the tensors that are not empty, and count the bytes sent. None if all are empty."""
    # Both ends know every length, so both leave out the same empty tensors.
    sends = [(index, part) for index, part in sends if part.numel()]
    # Receives first. Gloo tells a sender that its receiver is ready on the connection that carries tensors the other way:
    # issued behind a send, that word waits for the whole tensor, and the link works in one direction at a time.
    operations = [dist.P2POp(dist.irecv, part, axis.ranks[index], axis.group) for index, part in receives if part.numel()]
    operations += [dist.P2POp(dist.isend, part, axis.ranks[index], axis.group) for index, part in sends]
    traffic.bytes_sent[axis.name] += sum(part.nbytes for _, part in sends)
    return traffic.start(lambda: dist.batch_isend_irecv(operations)) if operations else None


@dataclass
class Exchange:
    """A transfer in progress into this rank's `target`. `wait` returns the received tensor on `device`."""

    source: torch.Tensor  # kept alive: the transfer reads it until `wait`
    target: torch.Tensor
    device: torch.device
    transfer: Transfer | None

    def wait(self) -> torch.Tensor:
        if self.transfer is not None:
            self.transfer.wait()
        return from_staging(self.target, self.device)


def start_all_to_all(x_N: torch.Tensor, send: list[int], receive: list[int], axis: Axis, traffic: Traffic) -> Exchange:
    """Start an all-to-all, [sum(send)] -> [sum(receive)]: send[i] values go to rank i of the axis, receive[i] come from
    it."""
    source, target = sendable(x_N, axis.group), receivable((sum(receive),), x_N, axis.group)
    # Gloo's all-to-all issues sends before receives: over a slow link it takes nearly twice as long as start_swap, but
    # within a machine it takes less of the cores.
    if target.is_cuda or not axis.far:
        traffic.bytes_sent[axis.name] += (sum(send) - send[axis.index]) * x_N.element_size()
        transfer = traffic.start(lambda: getattr(axis.joined, ALL_TO_ALL)(target, source, receive, send))
        return Exchange(source, target, x_N.device, transfer)
    leaving, coming = source.split(send), target.split(receive)
    coming[axis.index].copy_(leaving[axis.index])
    # Every rank begins with the rank after it, so that no two send to the same rank at once.
    others = [(axis.index + distance) % axis.size for distance in range(1, axis.size)]
    sends = [(index, leaving[index]) for index in others]
    receives = [(index, coming[index]) for index in reversed(others)]
    return Exchange(source, target, x_N.device, start_swap(receives, sends, axis, traffic))


def all_reduce(x: torch.Tensor, axis: Axis, traffic: Traffic) -> torch.Tensor:
    """Return the sum over the axis, in place if `x` is contiguous. `x` has the same shape on every rank. Counts the bytes of
    the ring algorithm: each of R ranks sends 2 (R - 1) / R of the tensor."""
    traffic.bytes_sent[axis.name] += 2 * (axis.size - 1) * x.nbytes // axis.size
    x = x.contiguous()
    target = sendable(x, axis.group)
    traffic.run(lambda: axis.joined.allreduce([target]))
    return target if target is x else x.copy_(target)


@dataclass
class Gathering:
    """An all-gather in progress. `wait` returns every rank's part, by index on the axis."""

    parts: list[torch.Tensor]
    source: torch.Tensor  # kept alive: the transfer reads it until `wait`
    device: torch.device
    transfer: Transfer | None

    def wait_pending(self) -> None:
        """Wait until the transfer has ended."""
        if self.transfer is not None:
            self.transfer.wait()
            self.transfer = None

    def wait(self) -> list[torch.Tensor]:
        self.wait_pending()
        return [from_staging(part, self.device) for part in self.parts]


def start_gather(part: torch.Tensor, lengths: Sequence[int], dim: int, axis: Axis, traffic: Traffic) -> Gathering:
    """Start gathering every rank's `part`, which has size lengths[i] along `dim` on rank i, possibly 0.

    Each rank sends to each other rank: an all-gather of NCCL or Gloo would need parts of equal size.
    """
    part = part.contiguous()
    source = sendable(part, axis.group)
    parts = [
        part if index == axis.index else receivable(_resized(part, dim, length), part, axis.group)
        for index, length in enumerate(lengths)
    ]
    others = [index for index in range(len(lengths)) if index != axis.index]
    receives, sends = [(index, parts[index]) for index in others], [(index, source) for index in others]
    return Gathering(parts, source, part.device, start_swap(receives, sends, axis, traffic))


def start_shift(x: torch.Tensor, length: int, dim: int, axis: Axis, traffic: Traffic) -> Exchange:
    """Start sending `x` to the next rank of the axis and receiving the previous one's, which has `length` along `dim`."""
    # As an all-to-all of which other parts are empty: one call of torch.distributed in place of three.
    shape, send, receive = _resized(x, dim, length), [0] * axis.size, [0] * axis.size
    send[(axis.index + 1) % axis.size], receive[axis.index - 1] = x.numel(), math.prod(shape)
    exchange = start_all_to_all(x.reshape(-1), send, receive, axis, traffic)
    exchange.target = exchange.target.view(shape)
    return exchange


def _resized(x: torch.Tensor, dim: int, length: int) -> list[int]:
    """Return the shape of `x` with `length` along `dim`."""
    return [*x.shape[:dim], length, *x.shape[dim + 1 :]]
