"""The calls of torch.distributed, as NCCL's process groups take them (torch 2.13, ProcessGroupNCCL.cpp).

A group's collectives and batches of transfers share one communicator, and so one queue; every two ranks that send to each
other outside of a batch have another one of their own.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch

from testing.mailbox import Distributed, Group, P2POp

from .fabric import Fabric
from .operation import Communicator, Operation, Tensors
from .rules import KNOWN, RuleBroken, Rules, place


@dataclass
class StrictMember:
    """A rank's place on its fabric."""

    fabric: Fabric
    rank: int
    groups: int = 1  # made so far, the whole world's included

    @property
    def world(self) -> Group:
        return Group(0, self.fabric.ranks)


@dataclass(frozen=True)
class StrictWork:
    """As torch.distributed's. `finish` runs on the rank's own thread once what it waits for is in place."""

    fabric: Fabric
    operation: Operation
    finish: Callable[[], None] = lambda: None

    def wait(self) -> bool:
        waited = self.operation.waited
        self.fabric.wait(self.operation, place())
        if not waited:
            self.operation.waited = True
            self.finish()
        return True


class StrictDistributed(Distributed):
    """See Distributed. `rules` are those of worlds to come; `fabrics`: of all worlds so far."""

    def __init__(self, rules: Rules):
        super().__init__()
        self.rules = rules
        self.fabrics: list[Fabric] = []

    def follow(self, rules: Rules) -> None:
        """From now on, also in the worlds that there are."""
        self.rules = rules
        for fabric in self.fabrics:
            fabric.rules = rules

    def world(self, size: int) -> Fabric:
        self.fabrics.append(Fabric(size, self.rules))
        return self.fabrics[-1]

    def enter(self, world: Fabric, rank: int) -> None:
        self._here.member = StrictMember(world, rank)

    def isend(self, tensor: torch.Tensor, dst: int, group: Group | None = None) -> StrictWork:
        return self._issue("transfer", {dst: [tensor]}, {}, {dst}, self._link(dst, group))

    def irecv(self, tensor: torch.Tensor, src: int, group: Group | None = None) -> StrictWork:
        return self._issue("transfer", {}, {src: [tensor]}, {src}, self._link(src, group))

    def batch_isend_irecv(self, p2p_op_list: list[P2POp]) -> list[StrictWork]:
        groups = {operation.group for operation in p2p_op_list}
        if len(groups) != 1:
            self._broken(f"a batch of {len(p2p_op_list)} transfers in {len(groups)} groups")
        sends: dict[int, list[torch.Tensor]] = {}
        receives: dict[int, list[torch.Tensor]] = {}
        for operation in p2p_op_list:
            of = sends if operation.op == self.isend else receives
            of.setdefault(operation.peer, []).append(operation.tensor)
        return [self._issue("batch", sends, receives, {*sends, *receives}, self._communicator(groups.pop()))]

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        group: Group | None = None,
        async_op: bool = False,
    ) -> StrictWork | None:
        communicator = self._communicator(group)
        for whole in (output, input):
            self._check(whole, "all-to-all")
        sends, receives = (
            {rank: [part] for rank, part in zip(communicator.ranks, whole.split(list(sizes)), strict=True)}
            for whole, sizes in ((input, input_split_sizes), (output, output_split_sizes))
        )
        return self._started(self._issue("all-to-all", sends, receives, communicator.ranks, communicator), async_op)

    def all_reduce(self, tensor: torch.Tensor, group: Group | None = None, async_op: bool = False) -> StrictWork | None:
        """The sum, in the order of the ranks on each of them: the same bits everywhere."""
        communicator = self._communicator(group)
        self._check(tensor, "all-reduce")
        parts = [torch.empty_like(tensor) for _ in communicator.ranks]
        work = self._issue(
            "all-reduce",
            {rank: [tensor] for rank in communicator.ranks},
            {rank: [part] for rank, part in zip(communicator.ranks, parts, strict=True)},
            communicator.ranks,
            communicator,
            lambda: tensor.copy_(functools.reduce(torch.add, parts)),
            tensor,
        )
        return self._started(work, async_op)

    def barrier(self, group: Group | None = None, device_ids: list[int] | None = None) -> None:
        communicator = self._communicator(group)
        self._issue("barrier", {}, {}, communicator.ranks, communicator).wait()

    def meet(self, group: Group | None = None) -> None:
        if group is not None:
            self.barrier(group)
            return
        member = self._here.member
        member.fabric.meet(member.rank, "a meeting", place())

    def new_group(self, ranks: list[int], timeout: timedelta | None = None, group_desc: str | None = None) -> Group | object:
        """As torch's: it makes no communicator, and waits for all ranks by the store only if the user wants that of torch
        (TORCH_DIST_INIT_BARRIER)."""
        made, member = super().new_group(ranks, timeout, group_desc), self._here.member
        if torch.distributed.distributed_c10d._is_barrier_after_init():
            member.fabric.meet(member.rank, f"a group of {ranks}", place())
        return made

    def destroy_process_group(self, group: Group | None = None) -> None:
        member = self._here.member
        member.fabric.end_group(member.rank, None if group is None else group.number)

    def get_backend(self, group: Group | None = None) -> str:
        """Neither Gloo nor NCCL: what asks for one of them does so for memory that is not a CPU's."""
        return "strict"

    def ranks_of(self, group: Group | None) -> tuple[int, ...]:
        return (group or self._here.member.world).ranks

    def _communicator(self, group: Group | None) -> Communicator:
        group = group or self._here.member.world
        return Communicator(group.number, group.ranks, False)

    def _link(self, peer: int, group: Group | None) -> Communicator:
        member = self._here.member
        return Communicator((group or member.world).number, tuple(sorted((member.rank, peer))), True)

    def _issue(
        self,
        kind: str,
        sends: Tensors,
        receives: Tensors,
        peers: Iterable[int],
        communicator: Communicator,
        finish: Callable[[], None] = lambda: None,
        in_place: torch.Tensor | None = None,
    ) -> StrictWork:
        member, where = self._here.member, place()
        if member.rank not in communicator.ranks:
            self._broken(f"{kind} on {communicator}, of which rank {member.rank} is none")
        for tensors in (*sends.values(), *receives.values()):
            for tensor in tensors:
                self._check(tensor, kind)

        def operation(number: int, ready: float) -> Operation:
            return Operation(
                kind, member.rank, communicator, number, where, ready, sends, receives, frozenset(peers), in_place
            )

        return StrictWork(member.fabric, member.fabric.issue(operation, member.rank, communicator, where), finish)

    def _check(self, tensor: torch.Tensor, kind: str) -> None:
        if not tensor.is_contiguous():
            self._broken(f"{kind} of a tensor {tuple(tensor.shape)} with strides {tensor.stride()}, not contiguous")
        if tensor.dtype not in KNOWN:
            self._broken(f"{kind} of {tensor.dtype}, which NCCL does not know")

    def _broken(self, what: str) -> NoReturn:
        member = self._here.member
        member.fabric.break_rule(RuleBroken(f"rank {member.rank}: {what}, at {place()}"))
