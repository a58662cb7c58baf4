"""A short run of `python -m tests.campaigns.orders`, and its controls."""

import json
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.rank.attention import ulysses
from parallel_backend.rank.comm import collectives
from tests.campaigns.orders.order import FILE, TIMINGS, Posted, check, hang, products
from tests.campaigns.transport.cases import product
from tests.campaigns.transport.runner import Trials, trials

pytestmark = pytest.mark.threads

QUICK = ("product pipe2-ulysses2-tensor2", "product patch2-ring2-ulysses2")


@pytest.fixture(scope="module")
def at_work(thread_pools, tmp_path_factory) -> Iterator[Trials]:
    """Within the session's own threads, so that it ends before them."""
    with trials(tmp_path_factory.mktemp("orders")) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_eight_ranks_post_in_the_committed_order(at_work, name):
    case = next(case for case in products() if case.name == name)
    found, _, wrong = check(at_work, case)
    assert not wrong
    assert found == json.loads(FILE.read_text())[name], "renew it if the new order is wanted"


def receives_early(start_all_to_all):
    """collectives.start_all_to_all. Rank 0 posts a receive before it that rank 1 answers behind it."""

    def started(x_N, send, receive, axis, traffic):
        word, swap = torch.zeros(1), collectives.start_swap
        early = swap([(1, word)], [], axis, traffic) if axis.index == 0 else None
        exchange = start_all_to_all(x_N, send, receive, axis, traffic)
        (early or swap([], [(0, word)], axis, traffic)).wait()
        return exchange

    return started


def test_an_early_receive_across_a_collective_is_caught(at_work):
    case = product(Degrees(ulysses=2))
    at_work.expected(case)
    with mock.patch.object(ulysses, "start_all_to_all", receives_early(ulysses.start_all_to_all)):
        assert "the order of issue differs between ranks" in (at_work.trial(case, TIMINGS[1]) or "nothing was caught")


@pytest.mark.parametrize(("one", "two"), [("axis", "axis"), ("axis", "link")], ids=["one communicator", "two communicators"])
def test_operations_without_a_common_order_hang(one, two):
    sum_of = [Posted(one, "all-reduce", ((0, 8, 8), (1, 8, 8)))] * 2
    receive, send = Posted(two, "transfer", ((1, 0, 4),)), Posted(two, "transfer", ((0, 4, 0),))
    assert not hang([[sum_of[0], receive], [sum_of[1], send]])
    assert "rank 0 waits at its operation 0" in hang([[receive, sum_of[0]], [sum_of[1], send]])
