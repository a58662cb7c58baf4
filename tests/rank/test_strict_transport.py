"""The stand-in with NCCL's rules catches what it is there for: one planted fault each, and no fault in a sound program."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.support.strict.distributed import StrictDistributed
from tests.support.strict.planted import on_ranks
from tests.support.strict.rules import ANY, ISSUE, Deadlock, RuleBroken, Rules

HERE = r"tests/rank/test_strict_transport\.py:\d+[^,;]*"
ONE_AT_A_TIME, MANY = Rules(places=1, launch=ISSUE), Rules(places=8, launch=ANY)


def said(work: Callable[[StrictDistributed, int], None], rules: Rules = MANY, kind: type[Exception] = RuleBroken) -> str:
    """What a rank that found the fault says."""
    found = [error for error in on_ranks(2, work, rules) if type(error) is kind]
    assert found, "nothing was caught"
    return str(found[0])


def own_group(dist: StrictDistributed, rank: int, groups: list[list[int]]):
    """Makes all of them; the one that the rank is in."""
    return next(made for made, ranks in [(dist.new_group(ranks), ranks) for ranks in groups] if rank in ranks)


@pytest.mark.parametrize("rules", [ONE_AT_A_TIME, MANY], ids=["one at a time", "many"])
def test_a_sound_program_gets_its_values(rules):
    """Every kind of call, several under way at once, in groups of which each rank is in three."""
    found = [{} for _ in range(4)]

    def work(dist, rank):
        rows, columns = (own_group(dist, rank, groups) for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
        neighbour, across = rank ^ 1, rank ^ 2
        mine, swapped, under_way = torch.full((3,), float(rank)), [torch.empty(3), torch.empty(3)], []
        for into in swapped:
            operations = [dist.P2POp(dist.isend, mine, neighbour, rows), dist.P2POp(dist.irecv, into, neighbour, rows)]
            under_way += dist.batch_isend_irecv(operations)
        summed = mine.clone()
        under_way.append(dist.all_reduce(summed, group=columns, async_op=True))
        turned, given = torch.empty(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32) + 10 * rank
        under_way.append(dist.all_to_all_single(turned, given, [1] * 4, [1] * 4, async_op=True))
        passed, sent = torch.empty(2), torch.full((2,), float(rank))
        under_way.append(dist.isend(sent, across) if rank < 2 else dist.irecv(passed, across))
        for transfer in reversed(under_way):
            transfer.wait()
        dist.barrier()
        found[rank] = {"swapped": swapped, "summed": summed, "turned": turned, "passed": passed}

    assert on_ranks(4, work, rules) == [None] * 4
    for rank, of in enumerate(found):
        assert all((into == rank ^ 1).all() for into in of["swapped"])
        assert (of["summed"] == rank + (rank ^ 2)).all()
        assert of["turned"].tolist() == [rank + 10 * other for other in range(4)]
        assert rank < 2 or (of["passed"] == rank ^ 2).all()


def test_a_send_buffer_that_is_reused():
    """Though the other rank has it already, which on a GPU nobody here could know."""

    def work(dist, rank):
        buffer = torch.ones(4)
        transfer = dist.isend(buffer, 1) if rank == 0 else dist.irecv(buffer, 0)
        if rank == 1:
            transfer.wait()
        dist.barrier()
        if rank == 0:
            buffer.zero_()
        transfer.wait()

    assert re.search(f"sent was changed before .* rank 0's transfer to 1 on link 0-1 of group 0 at {HERE}", said(work))


def test_a_missing_wait():
    """What is read before the wait is NaN, or a marked value, though it has arrived; and it is noticed at the end."""
    seen = {}

    def work(dist, rank):
        buffer, count = torch.ones(4), torch.ones(4, dtype=torch.int32)
        transfers = [dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0) for x in (buffer, count)]
        for transfer in transfers[: 2 if rank == 0 else 0]:
            transfer.wait()
        dist.barrier()
        seen[rank] = buffer.isnan().all().item(), (count == -1).all().item()

    assert "never waited for: rank 1's transfer from 0" in said(work)
    assert seen[1] == (True, True)


def test_an_order_that_differs_names_both_places():
    def work(dist, rank):
        ours, theirs = torch.ones(4), torch.empty(4)
        steps = [
            lambda: dist.all_reduce(ours.clone()),
            lambda: dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, ours, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
            ),
        ]
        for step in steps if rank == 0 else reversed(steps):
            step()

    assert re.search(f"order of issue differs between ranks: rank .* at {HERE}, but rank .* at {HERE}", said(work))


def exchange(dist, rank):
    into = torch.empty(4)
    operations = [dist.P2POp(dist.irecv, into, 1 - rank), dist.P2POp(dist.isend, torch.ones(4), 1 - rank)]
    dist.batch_isend_irecv(operations)[0].wait()


def turn(dist, rank):
    dist.all_to_all_single(torch.empty(8), torch.ones(8), [4, 4], [4, 4])


def pass_on(dist, rank, sender=0):
    (dist.isend(torch.ones(4), 1 - rank) if rank == sender else dist.irecv(torch.empty(4), 1 - rank)).wait()


@pytest.mark.parametrize(
    ("tried", "used", "first"),
    [
        (turn, exchange, "batch to"),
        (exchange, turn, "all-to-all to"),
        (pass_on, lambda dist, rank: pass_on(dist, rank, sender=1), "transfer (to|from)"),
        (exchange, lambda dist, rank: dist.all_reduce(torch.ones(4)), "a short sum"),
    ],
    ids=["batch", "all-to-all", "the other way", "sum"],
)
def test_a_connection_that_no_trial_has_opened(tried, used, first):
    """NCCL connects a pair, and for an algorithm, at the first use: hours later that would hang without a word. The control
    is a trial of the same kind."""
    rules = replace(MANY, trials=True)

    def after(trial):
        def work(dist, rank):
            with trials_of(dist):
                trial(dist, rank)
            dist.meet()
            used(dist, rank)

        return work

    @contextlib.contextmanager
    def trials_of(dist):
        dist.meet()
        dist.follow(replace(rules, trials=False))  # as in a trial: nothing is held against what comes
        yield
        dist.meet()
        dist.follow(rules)

    assert re.search(f"the first {first}.* comes outside of a trial: rank . *", said(after(tried)))
    assert on_ranks(2, after(used), rules) == [None, None]


def test_sizes_that_differ():
    def work(dist, rank):
        (dist.isend(torch.ones(4), 1) if rank == 0 else dist.irecv(torch.empty(5), 0)).wait()

    assert re.search(
        f"sizes differ, 16 bytes are sent where 20 belong: rank .* at {HERE}, but rank .* at {HERE}", said(work)
    )


def test_a_cycle_over_two_communicators():
    """Harmless where both may be under way at once."""

    def work(dist, rank):
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        dist.barrier(one)
        dist.barrier(two)
        groups = (one, two) if rank == 0 else (two, one)
        for transfer in [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in groups]:
            transfer.wait()

    words = said(work, ONE_AT_A_TIME, Deadlock)
    for rank, under_way, queued in ((0, 1, 2), (1, 2, 1)):
        place = rf"on communicator 0-1 of group {under_way} at {HERE}; queued: .* group {queued} at"
        assert re.search(f"Rank {rank}: host waits for .*; under way: rank {rank}'s all-reduce {place}", words)
    assert on_ranks(2, work, MANY) == [None, None]
