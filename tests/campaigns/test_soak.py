"""What the soak's verdict is there for. tests/comfyui/test_soak.py has short soaks."""

from dataclasses import replace

import pytest

from tests.campaigns.soak.record import CANCELLED, EMPTY, FINISHED, Ending, Reading, Soak
from tests.campaigns.soak.verdict import problems

WINDOW, ROUNDS = 20, 4


def clean() -> Soak:
    found = Soak(0, WINDOW, WINDOW * ROUNDS)
    for number in range(1, WINDOW * ROUNDS + 1):
        found.endings.append(Ending(number, "pipe 0", "pipe", "", FINISHED, difference=0.0))
        found.readings.append(Reading(number, EMPTY, "rank 0", 11, 300_000_000, 20, 9, files=1))
    return found


@pytest.mark.parametrize(
    ("ending", "reading", "said"),
    [
        ({}, {}, ""),
        ({"difference": 1e-7}, {}, "prompt 80 (pipe 0): differs from the same request alone by 1e-07"),
        ({"status": CANCELLED, "difference": None}, {}, "prompt 80 (pipe 0): was cancelled, though nobody asked for it"),
        ({}, {"allocated": 310_000_000}, "rank 0 grew by 3.3 % from 300.0 MB"),
        ({}, {"threads": 12}, "rank 0 has 12 threads with nothing loaded, 9 before"),
        ({}, {"files": 2}, "2 temporary files or folders at once, where one pool has one"),
    ],
)
def test_what_is_wrong_at_the_end_is_said(ending, reading, said):
    found = clean()
    found.endings[-1] = replace(found.endings[-1], **ending)
    found.readings[-WINDOW:] = [replace(each, **reading) for each in found.readings[-WINDOW:]]
    assert problems(found) == ([said] if said else [])
