"""A GPU that runs out of memory in the middle of a run costs the user a line and a step, not the picture."""

import pytest

from parallel_backend.placement.residency import ALL

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def found(inside):
    return inside.run("out_of_memory", name="tiny.safetensors")[0]


def test_the_second_try_streams_and_the_next_prompt_gives_the_same_picture(found):
    got = found["bands"]
    assert "error" not in got, got["traceback"]
    first, second = got["differences"]
    assert 0 < first < 0.1  # what is exact once more is closer to one rank's
    assert second == 0
    assert got["pools"] == [2, 2]  # the next prompt needs no third
    assert min(got["limits"]) < ALL
    assert len(got["told"]) == 1
    assert "cpu ran out of memory. One more try with new ranks" in got["told"][0]


def test_a_second_failure_is_an_error_that_says_what_to_change(found):
    first, advice, *_ = found["in vain"]["text"].splitlines()
    assert "OutOfMemoryError: CUDA out of memory" in first
    assert "The run was expected to take: cpu " in advice
    assert "set offload to" in advice
    assert found["in vain"]["pools"] <= 2
