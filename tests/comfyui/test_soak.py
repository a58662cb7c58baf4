"""A short soak; `python -m tests.campaigns.soak` is the long one."""

import pytest

from tests.campaigns.soak import soak

pytestmark = pytest.mark.comfyui

PROMPTS = 25


@pytest.mark.full
def test_prompts_at_random_equal_the_same_requests_alone(comfyui):
    found = soak(comfyui.checkout, PROMPTS, seed=1, said=print)
    assert found.wrong == []
    assert len(found.status) == PROMPTS
    assert found.compared >= PROMPTS / 2
    assert {reading.role for reading in found.readings[0]} >= {"ComfyUI", "rank 0", "rank 1"}
