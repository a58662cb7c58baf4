"""What Parallelize Model's `mode` stands for, by number of devices and by degrees that a parallel_config brings along."""

import pytest

from parallel_backend.core.degrees import Degrees
from parallel_backend.planning.named_modes import AUTO, degrees_of, ranks_of

NONE = Degrees()
PAIR = Degrees(ulysses=2)


@pytest.mark.parametrize(
    ("mode", "wanted", "possible", "given", "ranks"),
    [
        (AUTO, 0, 4, NONE, 4),
        ("ring", 3, 4, NONE, 3),
        ("tensor", 8, 4, NONE, 8),  # more than there are: the node says so
        ("pipefusion", 0, 5, PAIR, 4),
        ("pipefusion", 0, 1, PAIR, 2),
        ("split batch", 6, 8, PAIR, 6),
        (AUTO, 0, 4, PAIR, 2),
        ("ulysses", 2, 4, PAIR, 2),
    ],
)
def test_number_of_devices(mode, wanted, possible, given, ranks):
    assert ranks_of(mode, wanted, possible, given) == ranks


@pytest.mark.parametrize(("mode", "wanted"), [("pipefusion", 3), ("pipefusion", 1), ("ulysses", 4), (AUTO, 4)])
def test_a_number_that_given_degrees_do_not_go_into_is_refused(mode, wanted):
    with pytest.raises(ValueError, match=f"gpus is {wanted}, but parallel_config has ulysses_degree 2, for 2"):
        ranks_of(mode, wanted, 8, PAIR)


@pytest.mark.parametrize(
    ("mode", "ranks", "given", "degrees"),
    [
        ("pipefusion", 4, NONE, Degrees(pipe=4)),
        ("pipefusion", 4, PAIR, Degrees(pipe=2, ulysses=2)),
        ("split batch", 2, NONE, Degrees(batch=2)),
        ("tensor", 2, NONE, Degrees(tensor=2)),
        ("ring", 3, NONE, Degrees(ring=3)),
        ("ulysses", 5, NONE, Degrees(ulysses=5)),  # heads need not divide
        ("ulysses", 2, PAIR, PAIR),
    ],
)
def test_degrees_of_a_mode(mode, ranks, given, degrees):
    assert degrees_of(mode, ranks, given) == degrees
