"""Who speaks to whom over a communicator of its own."""

import pytest

from parallel_backend.core.communicators import communicators, connections, grouped_axes, pipe_links
from parallel_backend.core.degrees import Degrees


@pytest.mark.parametrize(
    ("degrees", "axes", "counts", "peers"),
    [
        (Degrees(), (), [0], [0]),
        (Degrees(batch=2), (), [1, 1], [1, 1]),
        (Degrees(pipe=2), (), [2, 2], [2, 2]),
        (Degrees(pipe=4), (), [2, 3, 3, 2], [4, 5, 5, 4]),
        (Degrees(ulysses=2), ("ulysses",), [2, 2], [2, 2]),
        (Degrees(ulysses=4), ("ulysses",), [2] * 4, [6] * 4),
        (Degrees(pipe=2, ulysses=2), ("ulysses",), [3] * 4, [5] * 4),
        (Degrees(patch=2, patch_mode="naive"), (), [1, 1], [1, 1]),
        (Degrees(patch=2, patch_mode="displaced", ring=2, tensor=2), ("patch", "ring", "tensor"), [4] * 8, [10] * 8),
    ],
    ids=str,
)
def test_a_rank_has_the_worlds_its_axes_and_its_links(degrees, axes, counts, peers):
    assert grouped_axes(degrees) == axes
    assert [communicators(degrees, rank) for rank in range(degrees.world)] == counts
    assert [connections(degrees, rank) for rank in range(degrees.world)] == peers


def test_links_join_neighbouring_stages_of_the_same_line_and_even_ones_come_first():
    assert pipe_links(Degrees(pipe=4)) == [(0, 1), (2, 3), (1, 2)]
    assert pipe_links(Degrees(batch=2, pipe=2, tensor=2)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert pipe_links(Degrees(ulysses=4)) == []
