"""Short soaks; `python -m tests.campaigns.soak` is the long one."""

import pytest

from tests.campaigns.soak import soak as soaking
from tests.campaigns.soak.record import EMPTY, FINISHED
from tests.campaigns.soak.verdict import problems

pytestmark = pytest.mark.comfyui

PROMPTS = 25


@pytest.mark.full
def test_prompts_at_random_equal_the_same_requests_alone(comfyui):
    lines = []
    found = soaking.soak(comfyui.checkout, PROMPTS, seed=1, said=lines.append)
    assert problems(found) == []
    assert len(found.endings) == PROMPTS
    assert len({ending.setup for ending in found.endings}) > 10
    compared = [ending for ending in found.endings if ending.difference is not None]
    assert [ending.status for ending in compared] == [FINISHED] * len(compared)
    assert len(compared) >= PROMPTS / 2
    assert {reading.role for reading in found.readings} >= {"ComfyUI", "rank 0", "rank 1", "rank 3"}
    assert any(reading.state == EMPTY for reading in found.readings)
    assert any("/25 prompts, " in line for line in lines)
