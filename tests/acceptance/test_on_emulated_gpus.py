"""The self-test's checks that need a GPU, on emulated ones: what is planted there is in their figures, or fails them.

The whole self-test runs there in processes (tests/gpu/test_gpu.py).
"""

import dataclasses
import itertools
from collections.abc import Iterator
from unittest import mock

import jsonschema
import pytest
import torch

from parallel_backend.acceptance import document, kit, measured_rank
from parallel_backend.acceptance.session import OneRank, SelfTestSession, Settings
from parallel_backend.rank.comm import peers
from tests.acceptance.test_self_test import valid
from tests.support.emulated_gpu import emulated
from tests.support.emulated_gpu.graphs import CudaGraph
from tests.support.emulated_gpu.host import page_locked
from tests.support.emulated_gpu.machine import Machine
from tests.support.emulated_gpu.nccl import gpu_ranks
from tests.support.fake_cuda import HOPPER

pytestmark = pytest.mark.threads

MB = 1_000_000


@pytest.fixture
def gpus() -> Iterator[Machine]:
    with emulated(HOPPER, HOPPER) as gpus:
        yield gpus


@pytest.fixture(params=[("cuda:0", "cuda:1")])
def session(gpus, request) -> Iterator[SelfTestSession]:
    """Its ranks are threads."""
    with gpu_ranks() as start:
        session = SelfTestSession(Settings(request.param))
        session._registry.start_of = lambda devices: start
        output = torch.ones(2)
        session.one_rank = OneRank({"fp32": output, "bf16": 1.005 * output}, output, output)
        yield session
        session.close()


def look(session: SelfTestSession, name: str, status: str = kit.PASSED) -> kit.Result:
    result = kit.look(name, session)
    assert result.status == status, result.why
    valid(document.document_of(session.settings, [result], 1.0))
    return result


def test_what_connections_take_is_told_apart_from_what_a_process_takes(session, gpus, monkeypatch):
    """Planted: 300 MB when a rank starts, and by what is opened 80 MB a communicator, 25 a peer, 7 a sum over all."""
    taking = {"open_communicator": 80 * MB, "try_pair": 25 * MB, "try_sum": 7 * MB}
    for name, nbytes in taking.items():
        opening = getattr(peers, name)

        def takes(*given, opening=opening, nbytes=nbytes):
            opening(*given)
            gpus.gpus[given[-1].index].elsewhere += nbytes

        monkeypatch.setattr(peers, name, takes)
    start_of = session._registry.start_of

    def start(settings):
        for gpu in gpus.gpus:
            gpu.elsewhere += 300 * MB
        return start_of(settings.devices)(settings)

    session._registry.start_of = lambda devices: start
    with measured_rank.noted(session.opened):
        figures = look(session, "memory").figures
    assert figures["MB of a process"] == pytest.approx(300, abs=3)
    sums = len(peers.SHORT_SUMS["cuda"])  # the world's, and none of the ring's
    assert figures["MB of a communicator, with its sums"] == 80 + 7 * sums / 2
    assert figures["MB of sends to and from one other rank"] == 25
    assert figures["MB that a first call takes"] == pytest.approx(0, abs=3)


@pytest.mark.parametrize(("budget", "found", "refused"), [(None, 4.29, False), (700 << 20, 5 * (1 << 27) / 1e9, True)])
@pytest.mark.slow
def test_the_drivers_budget_of_page_locked_memory_is_found(session, budget, found, refused):
    """As under WSL 2. What is page-locked after the refusal finds room."""
    page_locked.budget = budget
    result = look(session, "page-locked")
    figures = result.figures
    assert figures["GB that the driver page-locks"] == pytest.approx(found, rel=0.01)
    assert figures["refused more"] is refused
    assert all(figures[f"GB/s {way} the GPU"] > 0 for way in ("to", "from"))
    assert page_locked.nbytes < 1 << 27  # blocks are as they were
    other = dataclasses.replace(result, figures={name: figures[name] for name in figures if name != "refused more"})
    with pytest.raises(jsonschema.ValidationError):
        valid(document.document_of(session.settings, [other], 1.0))


def test_small_copies_without_page_locked_memory_are_found(session, monkeypatch):
    page_locked.budget = 700 << 20
    monkeypatch.setattr("parallel_backend.rank.host_memory.page_locks.RESERVE", 0)
    assert "find no page-locked memory" in look(session, "page-locked", kit.FAILED).why


# Two rank threads that capture at once would change torch's one setting for stops of the host: one rank.
ALONE = pytest.mark.parametrize("session", [("cuda:0",)], indirect=True, ids=["one rank"])


@ALONE
def test_graphs_are_replayed_and_equal(session):
    assert look(session, "graphs").figures["torch SDPA, one rank: replays from calls"] == 0


@ALONE
@pytest.mark.parametrize(("working", "why"), [(0, "a replay gave another output"), (2, "replays from calls is")])
@pytest.mark.slow
def test_graphs_that_leave_something_out_are_found(session, working, why):
    """`working`: replays that are right, the first of which the rank itself compares. Later ones change nothing."""
    replay, number = CudaGraph.replay, itertools.count(1)

    def some(graph):
        if next(number) <= working:
            replay(graph)

    with mock.patch.object(CudaGraph, "replay", some):
        assert why in look(session, "graphs", kit.FAILED).why
