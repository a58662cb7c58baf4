"""torch.distributed for ranks on hollow devices: who sends how many bytes to whom. Tensors of the host travel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from testing.mailbox import Distributed, Group, Letter, Member, Receipt, Route, Work, World

from .account import Account
from .tensors import Hollow


@dataclass(frozen=True)
class Parcel:
    """A hollow tensor that was sent."""

    shape: torch.Size
    dtype: torch.dtype


class HollowWorld(World):
    def post(self, route: Route, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, Hollow):
            super().post(route, tensor)
            return
        with self._changed:
            self._letters[Letter(route, self._sent[route])] = Parcel(tensor.shape, tensor.dtype)
            self._sent[route] += 1
            self._changed.notify_all()


class HollowReceipt(Receipt):
    def wait(self) -> None:
        came, into = self.world.take(self.letter), self.into
        assert (came.shape, came.dtype) == (into.shape, into.dtype), f"{self.letter.route}: {came} where {into} belongs"


class HollowMember(Member):
    account: Account

    def send(self, kind: str, tensor: torch.Tensor, to: int, group: Group | None) -> Work:
        if isinstance(tensor, Hollow) and to != self.rank:
            self.account.sent[to] += tensor.nbytes
        return super().send(kind, tensor, to, group)

    def receive(self, kind: str, into: torch.Tensor, source: int, group: Group | None) -> Receipt:
        receipt = super().receive(kind, into, source, group)
        return HollowReceipt(receipt.world, receipt.letter, into) if isinstance(into, Hollow) else receipt


class HollowDistributed(Distributed):
    """`accounts`: by rank."""

    def __init__(self, accounts: Sequence[Account]):
        super().__init__()
        self.accounts = accounts

    def world(self, size: int) -> World:
        return HollowWorld(size)

    def enter(self, world: World, rank: int) -> None:
        self._here.member = member = HollowMember(world, rank)
        member.account = self.accounts[rank]

    def all_reduce(self, tensor: torch.Tensor, group: Group | None = None, async_op: bool = False) -> Work | None:
        if not isinstance(tensor, Hollow):
            return super().all_reduce(tensor, group, async_op)
        member, ranks = self._here.member, self.ranks_of(group)
        # As in NCCL's ring: each rank sends every part to the next one in both of the rounds, but for its own.
        after = ranks[(ranks.index(member.rank) + 1) % len(ranks)]
        member.account.sent[after] += 2 * (len(ranks) - 1) * tensor.nbytes // len(ranks)
        for rank in ranks:
            member.world.post(Route("all-reduce", (group or member.world.group).number, member.rank, rank), tensor)
        work = Work([member.receive("all-reduce", tensor, rank, group) for rank in ranks])
        return self._started(work, async_op)

    def is_nccl_available(self) -> bool:
        return True

    def get_backend(self, group: Group | None = None) -> str:
        return "nccl"
