"""`degrees` auto in a real ComfyUI: what is chosen, and that the picture is that of the same degrees by hand."""

import re

import pytest

from .conftest import asked

pytestmark = pytest.mark.comfyui

CASES = {"batches", "pipefusion", "advised", "cancelled"}


@pytest.fixture(scope="module")
def found(request, inside):
    return inside.run("auto_degrees", skip=CASES - asked(request, "case"))[0]


@pytest.fixture
def case(request, found) -> dict:
    """What inside/auto_degrees.py found of the case that the test is marked with."""
    return found[request.param]


def of(name: str) -> pytest.MarkDecorator:
    """The decorator of a test of this case."""
    return pytest.mark.parametrize("case", [name], indirect=True)


BOTH, ONE = ["cpu", "cpu"], ["cpu"]


@of("batches")
def test_two_prompts_go_side_by_side(case):
    assert case["before"] == ["one rank", ONE]  # nothing is known before the first run
    assert case["chosen"] == ["split_batch_degree 2", BOTH]
    assert case["difference"] == 0
    assert case["said"].startswith("Parallel DiT: degrees auto: split_batch_degree 2 on cpu, cpu, planned ")


@of("pipefusion")
def test_pipefusion_is_taken_where_it_is_applied_and_nowhere_else(case):
    assert case["chosen"] == case["again"] == ["pipefusion_degree 2", BOTH]
    assert case["without"] == ["one rank", ONE]
    assert case["measured"] == 1


@pytest.mark.full
@of("advised")
def test_another_setting_that_is_faster_is_named_once(case):
    stages, again, replicas, cached = (text.splitlines() for text in case["ended"])
    for text in (stages, again, replicas):
        assert re.fullmatch(r"Parallel DiT: [\d.]+ s, 0\.0 x one rank", text[0])
        assert text[1] == "exact, on 2 ranks"
    assert stages[2:] == ["split_batch_degree 2 would take about 0.0 s (see Parallel Doctor)"]
    assert again[2:] == replicas[2:] == []
    assert "s a step" in cached[0], "one GPU may have the step cache too"
    assert cached[1] == "close to exact: step cache"
    assert cached[2].startswith("step cache: ")


@of("cancelled")
def test_cancel_while_calibrating(case):
    assert case["stopped"]
    assert case["chosen"] == ["split_batch_degree 2", BOTH]


def test_stages_by_hand_are_refused(found):
    assert "stage_split is '3,2', but the stages are unknown if degrees is auto" in found.error("stages_by_hand")
