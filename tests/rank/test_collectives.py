"""What transfers count and note: bytes that left the rank, the micro-step in which a transfer began, whose error it is."""

from types import SimpleNamespace

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.rank.comm import collectives, peers
from parallel_backend.rank.comm.mesh import Axis, make_mesh
from parallel_backend.rank.comm.transfers import PeerError, Traffic
from parallel_backend.wire.timeline_kinds import TRANSFER, WAIT
from testing import mini

DONE = SimpleNamespace(wait=lambda: True)
GROUP = SimpleNamespace(**{collectives.ALL_TO_ALL: lambda *_: DONE, "allreduce": lambda *_: DONE})
AXIS = Axis("ulysses", 3, 1, (0, 1, 2), GROUP)


def test_what_a_rank_keeps_of_an_all_to_all_is_not_sent():
    traffic = Traffic(torch.device("cpu"))
    exchange = collectives.start_all_to_all(torch.zeros(12), [2, 7, 3], [1, 7, 2], AXIS, traffic)
    assert exchange.wait().shape == (10,)
    assert traffic.report()[0] == {"ulysses": (2 + 3) * 4}
    assert traffic.report()[0] == {}


def test_a_sum_counts_as_the_ring_moves_it():
    traffic = Traffic(torch.device("cpu"))
    collectives.all_reduce(torch.zeros(30), AXIS, traffic)
    assert traffic.report()[0] == {"ulysses": 2 * 2 * 30 * 4 // 3}


def test_a_transfer_is_of_the_micro_step_in_which_it_began_and_a_wait_of_its_own():
    traffic = Traffic(torch.device("cpu"))
    first, second = (1, 0, 8, 1), (2, 8, 16, 0)
    traffic.recorder.step = first
    transfer = traffic.start(lambda: DONE)
    traffic.recorder.step = second
    transfer.wait()
    _, labels, lost = traffic.recorder.read()
    assert labels.tolist() == [[TRANSFER, *first], [WAIT, *second]]
    assert lost == 0


@pytest.mark.parametrize(
    ("error", "peers"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:41"), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (torch.distributed.DistBackendError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (NotImplementedError("no such operation"), False),
    ],
)
def test_only_an_error_of_the_transfer_may_be_another_ranks(error, peers):
    """Whether it comes when the transfer is started or when it is waited for."""

    def fail() -> None:
        raise error

    traffic = Traffic(torch.device("cpu"))
    for attempt in (lambda: traffic.start(fail), traffic.start(lambda: SimpleNamespace(wait=fail)).wait):
        with pytest.raises(PeerError if peers else type(error)):
            attempt()


@pytest.mark.threads
@pytest.mark.parametrize("degrees", [Degrees(ulysses=3), Degrees(ulysses=2, ring=2)], ids=str)
def test_ulysses_over_a_network_gives_the_same_bits(degrees, thread_pools, mini_file, monkeypatch):
    """Uneven heads and tokens, some ranks with none of the picture."""
    sizes = {"batch": 2, "height": 15, "width": 11}, {"batch": 1, "height": 4, "width": 10, "text": 3}
    given, swaps, swap = [mini.inputs(**each) for each in sizes], [], collectives.start_swap
    monkeypatch.setattr(collectives, "start_swap", lambda *parts: swaps.append(len(parts)) or swap(*parts))

    def outputs() -> tuple[list[torch.Tensor], int]:
        """And how many transfers were receives and sends."""
        thread_pools.forget(degrees.world)  # the mesh is made anew
        model = thread_pools.mini(mini_file, degrees)
        swaps.clear()
        return [model.predict(ModelCall(*each), lambda: None) for each in given], len(swaps)

    near, before = outputs()
    monkeypatch.setattr(peers, "make_mesh", lambda *arguments: make_mesh(*arguments[:3], far=True))
    far, after = outputs()
    assert all(map(torch.equal, near, far))
    assert after > before
