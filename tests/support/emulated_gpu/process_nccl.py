"""NCCL between rank processes on emulated devices: the strict transport's calls and streams, with Gloo to carry the bytes.

Where ranks have devices of their own, each process gets ProcessNccl in the place of torch.distributed when it joins. Bytes
go by Gloo, between the CPU tensors that have the values, in each communicator's order. Held to NCCL's rules: contiguous
tensors of the thread's device, streams, the first transfer of a kind with a peer in a trial, no change of what is under way,
and equal order, sizes and dtypes on both ranks of a pair, which write down what they issue where the other can read it.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as gloo

from testing.mailbox import REPLACED
from tests.support.strict.distributed import StrictMember
from tests.support.strict.operation import Communicator, Connection, Operation
from tests.support.strict.rules import TRIAL, RuleBroken, poison

from .machine import machine
from .nccl import EmulatedNccl


class GlooFabric:
    """What StrictDistributed uses of a Fabric, of the ranks in processes. `folder`: of the notes, the same for all ranks."""

    def __init__(self, rank: int, world: int, folder: Path):
        self.ranks = tuple(range(world))
        self._rank, self._folder = rank, folder
        self._numbers: Counter[tuple[Communicator, int]] = Counter()
        self._connected: dict[Communicator, set[Connection]] = defaultdict(set)
        self._under_way: dict[Operation, list[dist.Work]] = {}
        folder.mkdir(exist_ok=True)

    def issue(
        self, operation: Callable[[int, float], Operation], _rank: int, communicator: Communicator, where: str
    ) -> Operation:
        op = operation(0, 0.0)
        new = set(op.connections) - self._connected[communicator]
        if new and TRIAL not in where:
            self.break_rule(RuleBroken(f"the first {new.pop()} comes outside of a trial: {op}"))
        self._connected[communicator] |= new
        for peer in sorted(op.peers - {self._rank}):
            self._note(op, peer)
        tag = 2 * communicator.group + communicator.linked
        works = []
        for peer, tensors in op.receives.items():
            for place_of, tensor in enumerate(tensors):
                if peer == self._rank:
                    with torch.inference_mode():
                        tensor.copy_(op.sends[peer][place_of])
                elif tensor.numel():
                    poison(tensor)
                    works.append(gloo.irecv(tensor, peer, tag=tag))
        works += [
            gloo.isend(tensor, peer, tag=tag)
            for peer, tensors in op.sends.items()
            for tensor in tensors
            if peer != self._rank and tensor.numel()
        ]
        if op.kind == "barrier":
            assert communicator.ranks == self.ranks
            works.append(gloo.barrier(async_op=True))
        self._under_way[op] = works
        return op

    def wait(self, op: Operation, _where: str) -> None:
        for work in self._under_way.pop(op, ()):
            work.wait()
        try:
            op.check_unchanged()
        except RuleBroken as error:
            self.break_rule(error)

    def break_rule(self, error: RuleBroken) -> NoReturn:
        machine.record.violation(str(error))
        raise error

    def meet(self, *_: Any) -> None:
        """Does nothing: what is no transfer goes by the product's own store."""

    def end_group(self, _rank: int, group: int | None) -> None:
        for op in self._under_way:
            if group in (None, op.communicator.group):
                self.break_rule(RuleBroken(f"never waited for: {op}"))
        if group is None:
            gloo.destroy_process_group()

    def _note(self, op: Operation, peer: int) -> None:
        """Write down what this rank issues with the peer. RuleBroken where the peer has issued something else."""
        number = self._numbers[op.communicator, peer]
        self._numbers[op.communicator, peer] += 1
        ours, theirs = ([[nbytes, str(dtype)] for nbytes, dtype in sizes] for sizes in op.sizes(peer))
        with self._file(op.communicator, self._rank, peer).open("a") as notes:
            notes.write(json.dumps([op.kind, ours, theirs, str(op)]) + "\n")
        other = self._file(op.communicator, peer, self._rank)
        lines = other.read_text().split("\n")[:-1] if other.exists() else []  # the last one may be half written
        if number < len(lines):
            kind, sent, expected, said = json.loads(lines[number])
            if [kind, sent, expected] != [op.kind, theirs, ours]:
                self.break_rule(
                    RuleBroken(f"what two ranks issue differs: {op} {ours} {theirs}, but {said} {sent} {expected}")
                )

    def _file(self, communicator: Communicator, rank: int, peer: int) -> Path:
        ranks = "-".join(map(str, communicator.ranks))
        return self._folder / f"{communicator.group} {communicator.linked} {ranks} {rank} {peer}"


class ProcessNccl(EmulatedNccl):
    """NCCL of all threads of the process."""

    def __init__(self, member: StrictMember):
        super().__init__()
        self._here = SimpleNamespace(member=member)


def is_nccl_available() -> bool:
    return True


def init_process_group(backend: str, store: dist.Store, rank: int, world_size: int, **named: Any) -> None:
    """torch.distributed's. From then on the process's own is NCCL's, where that is the backend."""
    gloo.init_process_group("gloo", store=store, rank=rank, world_size=world_size, **named)
    if backend != "nccl":
        return
    fabric = GlooFabric(rank, world_size, machine.folder / f"nccl {Path(store.path).parent.name}")
    nccl = ProcessNccl(StrictMember(fabric, rank))
    for name in REPLACED & vars(dist).keys():
        setattr(dist, name, getattr(nccl, name))
