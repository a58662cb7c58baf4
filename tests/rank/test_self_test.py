"""The self-test of the links: what it notices, and what it says to try."""

import contextlib
import functools
import itertools
import threading
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.rank.comm import mesh, peers, self_test
from parallel_backend.rank.comm.guard import Guard
from parallel_backend.rank.comm.mesh import Axis, LinkEnd
from parallel_backend.rank.comm.peers import Peers
from parallel_backend.rank.comm.self_test import LinkError, advice, rounds, try_link, try_sum
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.rank_settings import RankSettings, SelfTest
from testing.mailbox import Distributed
from testing.thread_ranks import Meeting

CPU = torch.device("cpu")


class Faulty(Distributed):
    """Transfers between four ranks. Those of the pair hang until `healed`, or arrive wrong from its first rank.

    `at_once`: in the all-to-all alone, beside those of others.
    """

    def __init__(self, pair: tuple[int, int] = (), hangs: bool = False, at_once: bool = False):
        super().__init__()
        self.pair, self.hangs, self.at_once = pair, hangs, at_once
        self.healed = threading.Event()
        self.reports = 2 if hangs else 1 if pair else 0

    def batch_isend_irecv(self, p2p_op_list):
        rank = self._here.member.rank
        if {rank, p2p_op_list[0].peer} == {*self.pair}:
            if self.hangs:
                self.healed.wait(60)
            elif not self.at_once and rank == self.pair[0]:
                p2p_op_list[1].tensor[-2:] = 0
        return super().batch_isend_irecv(p2p_op_list)

    def all_to_all_single(self, output, input, output_split_sizes, input_split_sizes, group=None, async_op=False):
        if self.at_once and self._here.member.rank == self.pair[0] and all(input_split_sizes):
            input.split(input_split_sizes)[self.pair[1]][-2:] = 0
        return super().all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)


def errors_of(dist: Faulty, degrees: Degrees, seconds: float = 30.0) -> dict[int, str]:
    """By rank: the error with which joining the others, or making the mesh, ended on four ranks in threads."""
    world, found, over = dist.world(4), {}, threading.Event()
    devices = tuple(f"cuda:{rank}" for rank in range(4))

    def note(rank: int, error: BaseException) -> None:
        found.setdefault(rank, str(error))
        if len(found) == dist.reports:
            over.set()

    told: dict = {}

    def run(rank: int) -> None:
        dist.enter(world, rank)
        settings = RankSettings(devices, 1, timedelta(minutes=1), self_test=SelfTest(seconds), rank=rank, rendezvous=("", 0))
        # The guard calls `note` while the rank itself is blocked.
        own = Peers(settings, Meeting(dist, told), Guard(Heartbeat(), lambda: None, functools.partial(note, rank)))
        try:
            own.join()
            own.enter_mesh(degrees)
        except LinkError as error:
            note(rank, error)
        except RuntimeError:  # the ranks were ended
            pass

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(peers, join=lambda *_: None, is_far=lambda: False))
        for module in (self_test, mesh):
            stack.enter_context(mock.patch.object(module, "dist", dist))
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(4)]
        for thread in threads:
            thread.start()
        if dist.reports:
            assert over.wait(30)
            world.end()
            dist.healed.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    return found


@pytest.mark.parametrize("degrees", [Degrees(ulysses=4), Degrees(pipe=2, tensor=2), Degrees(ring=2, ulysses=2)], ids=str)
def test_working_links_pass(degrees):
    assert errors_of(Faulty(), degrees) == {}


def test_every_pair_is_tried_once_and_no_rank_has_two_at_a_time():
    for size in range(2, 9):
        pairs = [pair for together in rounds(size) for pair in together]
        assert sorted(pairs) == list(itertools.combinations(range(size), 2))
        assert all(len({*itertools.chain(*together)}) == 2 * len(together) > 0 for together in rounds(size))


@pytest.mark.parametrize("pair", [(0, 1), (1, 3), (0, 3)])
def test_a_pair_that_hangs_is_named_by_its_two_ranks_alone(pair):
    """The others wait by the store, and take nobody for broken."""
    found = errors_of(Faulty(pair, hangs=True), Degrees(ulysses=4), seconds=0.2)
    assert sorted(found) == list(pair)
    one, two = pair
    for text in found.values():
        assert f"a transfer between rank {one} (cuda:{one}) and rank {two} (cuda:{two}), on all ranks, did not end" in text
        assert "within 0.2 s. Try: " in text


@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "beside others"])
def test_wrong_values_are_named_by_their_sender(at_once):
    """As direct access between GPUs gives behind an IOMMU."""
    found = errors_of(Faulty((3, 1), at_once=at_once), Degrees(ulysses=4))
    where = "an all-to-all over all" if at_once else "between rank 1 (cuda:1) and rank 3 (cuda:3), on all"
    assert f"{where} ranks" in found[1] and "gave 2 wrong values of 1024 from rank 3. Try: " in found[1]


def test_wrong_sums_and_wrong_hidden_states_are_seen(monkeypatch):
    def all_reduce(tensor, group):
        tensor.fill_(1.0 + 2.0)[-2:] = 0

    def irecv(tensor, _source, group):
        tensor.copy_(torch.arange(len(tensor)))[-2:] = 0
        return SimpleNamespace(wait=lambda: True)

    monkeypatch.setattr(self_test, "dist", SimpleNamespace(all_reduce=all_reduce, irecv=irecv))
    with pytest.raises(ValueError, match="gave 2 wrong values of 16"):
        try_sum(Axis("tensor", 2, 1, (0, 1), None), 16, CPU)
    with pytest.raises(ValueError, match="gave 2 wrong values of 1024"):
        try_link(LinkEnd(0, False, None), CPU)


def test_what_to_try(monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    text = str(LinkError("the link to rank 1 (cuda:1)", "did not end within 60 s", "nccl"))
    assert "failed: the link to rank 1 (cuda:1) did not end within 60 s. Try: set NCCL_P2P_DISABLE=1" in text
    for word in ("IOMMU", "ACS", "/dev/shm", "driver", "logs"):
        assert word in text
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert "was off already" in advice("nccl")
    assert "NCCL" not in advice("gloo") and "GLOO_SOCKET_IFNAME" in advice("gloo")
