"""Who speaks to whom over a communicator of its own."""

import pytest

from parallel_backend.core.communicators import grouped_axes, pipe_links
from parallel_backend.core.degrees import Degrees


@pytest.mark.parametrize(
    ("degrees", "axes"),
    [
        (Degrees(), ()),
        (Degrees(batch=2), ()),
        (Degrees(pipe=4), ()),
        (Degrees(pipe=2, ulysses=2), ("ulysses",)),
        (Degrees(patch=2, patch_mode="naive"), ()),
        (Degrees(patch=2, patch_mode="displaced", ring=2, tensor=2), ("patch", "ring", "tensor")),
    ],
    ids=str,
)
def test_axes_with_collective_transfers_have_communicators(degrees, axes):
    assert grouped_axes(degrees) == axes


def test_links_join_neighbouring_stages_of_the_same_line_and_even_ones_come_first():
    assert pipe_links(Degrees(pipe=4)) == [(0, 1), (2, 3), (1, 2)]
    assert pipe_links(Degrees(batch=2, pipe=2, tensor=2)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert pipe_links(Degrees(ulysses=4)) == []
