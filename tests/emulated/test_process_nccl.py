"""The rules to which NCCL between rank processes is held, each broken once. Here both ranks are of this process."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tests.support.emulated_gpu import emulated, process_nccl
from tests.support.emulated_gpu.machine import machine
from tests.support.emulated_gpu.process_nccl import GlooFabric, ProcessNccl
from tests.support.fake_cuda import ADA
from tests.support.strict.distributed import StrictMember
from tests.support.strict.rules import RuleBroken


@pytest.fixture
def ranks(tmp_path, monkeypatch) -> Iterator[list[ProcessNccl]]:
    done = SimpleNamespace(wait=lambda: True)
    monkeypatch.setattr(process_nccl, "gloo", SimpleNamespace(isend=lambda *_, **__: done, irecv=lambda *_, **__: done))
    monkeypatch.setattr(process_nccl, "TRIAL", "")  # in every place
    with emulated(ADA, checks=False):
        yield [ProcessNccl(StrictMember(GlooFabric(rank, 2, tmp_path / "notes"), rank)) for rank in range(2)]


def on_card(count: int) -> torch.Tensor:
    return torch.zeros(count, device="cuda:0")


def test_what_both_ranks_issue_alike_is_let_pass(ranks):
    for work in (ranks[0].isend(on_card(4), 1), ranks[1].irecv(on_card(4), 0)):
        work.wait()
    for rank in ranks:
        rank._here.member.fabric.end_group(0, 0)
    assert not machine.record.violations


def test_sizes_that_differ(ranks):
    ranks[0].isend(on_card(4), 1)
    with pytest.raises(RuleBroken, match="what two ranks issue differs"):
        ranks[1].irecv(on_card(8), 0)
    # Noted too, for a rank that swallows the error; beside the tensor that was let go of under way.
    assert any("what two ranks issue differs" in noted for noted in machine.record.violations)


def test_a_first_transfer_outside_of_a_trial(ranks, monkeypatch):
    ranks[0].isend(on_card(4), 1).wait()
    monkeypatch.setattr(process_nccl, "TRIAL", "rank/comm/self_test.py")
    ranks[0].isend(on_card(4), 1).wait()  # no longer the first
    with pytest.raises(RuleBroken, match="the first transfer from 1 comes outside of a trial"):
        ranks[0].irecv(on_card(4), 1)


def test_an_operation_that_is_never_waited_for(ranks):
    ranks[0].isend(on_card(4), 1)
    with pytest.raises(RuleBroken, match="never waited for"):
        ranks[0].destroy_process_group(ranks[0]._here.member.world)


def test_a_tensor_of_the_host(ranks):
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        ranks[0].isend(torch.zeros(4), 1)
