"""The groups of a mesh: made by every rank in the same order, with the pool's timeout; and which receives are early."""

from datetime import timedelta

import pytest
import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.rank.comm.mesh import grouped_axes, make_mesh, pipe_links
from parallel_backend.rank.comm.transfers import PeerError
from tests.support.alone import nobody

TIMEOUT = timedelta(minutes=30)


@pytest.fixture
def made(monkeypatch):
    """What new_group was called with, and gives."""
    made = []

    def new_group(ranks, timeout, group_desc):
        made.append((tuple(ranks), timeout, group_desc))
        return made[-1]

    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    return made


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(pipe=4),
        Degrees(batch=2, pipe=2, ulysses=2),
        Degrees(pipe=3, ring=2, tensor=2),
        Degrees(patch=2, patch_mode="displaced", ulysses=2),
    ],
    ids=str,
)
def test_every_rank_makes_all_groups_in_one_order_and_has_its_own(made, degrees):
    orders = []
    for rank in range(degrees.world):
        mesh = make_mesh(degrees, rank, TIMEOUT)
        assert all(rank in ranks for ranks, _, _ in mesh.groups)
        assert len(mesh.groups) == len(grouped_axes(degrees)) + sum(rank in link for link in pipe_links(degrees))
        assert all(timeout == TIMEOUT for _, timeout, _ in made)
        orders.append([ranks for ranks, _, _ in made])
        made.clear()
    assert all(order == orders[0] for order in orders)


def test_both_ends_of_a_link_share_a_group_that_nothing_else_uses(made):
    degrees = Degrees(pipe=3, ulysses=2)
    meshes = [make_mesh(degrees, rank, TIMEOUT) for rank in range(degrees.world)]
    for rank, mesh in enumerate(meshes):
        after = mesh.link(sends=True)
        assert (after is None) == (rank >= 4) and (mesh.link(sends=False) is None) == (rank < 2)
        if after is not None:
            other = meshes[after.peer].link(sends=False)
            assert (after.peer, other.peer) == (rank + 2, rank)
            assert after.group == other.group == ((rank, rank + 2), TIMEOUT, "link")


@pytest.mark.parametrize("moment", ["make_mesh", "close_mesh", "a measurement"])
def test_a_rank_that_is_gone_is_not_taken_for_a_failure_of_the_rank_that_lost_it(monkeypatch, moment):
    """Else a rank's own error, of Gloo, hides whose process was killed if it comes first."""
    peers, degrees = nobody(), Degrees()

    def fail(*_):
        raise RuntimeError("Connection reset by peer")

    def all_of_it():
        peers.enter_mesh(degrees)
        with peers.waiting():
            if moment == "a measurement":
                fail()
        peers.leave_mesh(degrees)

    if moment.endswith("mesh"):
        monkeypatch.setattr(f"parallel_backend.rank.comm.peers.{moment}", fail)
    with pytest.raises(PeerError, match="reset by peer"):
        all_of_it()
