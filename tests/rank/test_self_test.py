"""The self-test of the links: what it notices, and what it says to try."""

import os
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from parallel_backend.rank.comm import self_test
from parallel_backend.rank.comm.mesh import Axis, LinkEnd
from parallel_backend.rank.comm.process_group import join
from parallel_backend.rank.comm.rendezvous import Rendezvous
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
    try_link(LinkEnd(0, False, None), CPU)


@pytest.mark.parametrize("attempt", [lambda: try_axis(AXIS, CPU), lambda: try_link(LinkEnd(0, False, None), CPU)])
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


@pytest.mark.parametrize("p2p", [True, False])
@pytest.mark.parametrize("debug", [None, "INFO"])
def test_what_nccl_is_told(tmp_path, p2p, debug):
    """It warns into the rank's log. No device is bound: all transfers of two ranks would share a communicator."""
    (tmp_path / "store").touch()
    second = timedelta(seconds=1)
    chosen = {} if debug is None else {"NCCL_DEBUG": debug}
    others = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    with (
        mock.patch.dict(os.environ, others | chosen, clear=True),
        mock.patch.object(torch.distributed, "init_process_group") as init,
    ):
        join(0, ("cpu", "cpu"), Rendezvous(tmp_path / "store", 2, second), second, p2p)
        assert os.environ["NCCL_DEBUG"] == (debug or "WARN")
        assert os.environ.get("NCCL_P2P_DISABLE") == (None if p2p else "1")
    assert init.call_args.kwargs["timeout"] == second and "device_id" not in init.call_args.kwargs
