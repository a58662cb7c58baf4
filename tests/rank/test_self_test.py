"""The self-test of the links: what it notices, and what it says to try."""

from types import SimpleNamespace

import pytest
import torch

from parallel_backend.rank.comm import self_test
from parallel_backend.rank.comm.mesh import Axis, Link
from parallel_backend.rank.comm.self_test import LinkError, advice, try_axis, try_link

CPU = torch.device("cpu")
AXIS = Axis("ulysses", 3, 1, (0, 1, 2), None)


def distributed(change=lambda tensor: None) -> SimpleNamespace:
    """Transfers between working ranks, but for a `change` to what arrives."""

    def all_reduce(tensor, group):
        tensor.fill_(1.0 + 2.0 + 3.0)
        change(tensor)

    def irecv(tensor, _source, group):
        tensor.copy_(torch.arange(len(tensor)))
        change(tensor)
        return SimpleNamespace(wait=lambda: True)

    return SimpleNamespace(all_reduce=all_reduce, irecv=irecv)


def test_right_values_pass(monkeypatch):
    monkeypatch.setattr(self_test, "dist", distributed())
    try_axis(AXIS, CPU)
    try_link(Link(0, False, None), CPU)


@pytest.mark.parametrize("attempt", [lambda: try_axis(AXIS, CPU), lambda: try_link(Link(0, False, None), CPU)])
def test_wrong_values_are_seen(monkeypatch, attempt):
    """As direct access between GPUs gives behind an IOMMU."""
    monkeypatch.setattr(self_test, "dist", distributed(lambda tensor: tensor[-2:].zero_()))
    with pytest.raises(ValueError, match="gave 2 wrong values"):
        attempt()


def test_what_to_try(monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    text = str(LinkError("the link to rank 1 (cuda:1)", "did not end within 60 s", "nccl", True))
    assert "failed: the link to rank 1 (cuda:1) did not end within 60 s. Try: set NCCL_P2P_DISABLE=1" in text
    for word in ("IOMMU", "ACS", "/dev/shm", "driver", "logs"):
        assert word in text
    assert "was off already" in advice("nccl", False)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert "was off already" in advice("nccl", True)
    assert "NCCL" not in advice("gloo", True) and "GLOO_SOCKET_IFNAME" in advice("gloo", True)
