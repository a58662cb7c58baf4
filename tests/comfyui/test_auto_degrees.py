"""`degrees` auto in a real ComfyUI: what is chosen, and that the picture is that of the same degrees by hand."""

import re

import pytest

from .conftest import asked

pytestmark = pytest.mark.comfyui

CASES = {"batches", "pipefusion", "for_real", "advised", "cancelled"}


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
@of("for_real")
def test_real_ranks_are_calibrated_once_and_the_file_is_kept(case):
    gained, of = case["gained"].split(" ", 1)
    assert of == "x one rank"
    assert 0 < float(gained) < 10, "what a kept calibration says of one rank, beside what the run took"
    degrees, _ = case["chosen"]
    chosen = "one device, cpu" if degrees == "one rank" else f"{degrees} on cpu"
    assert case["said"].startswith(f"Parallel DiT: degrees auto: {chosen}")
    assert case["again"] == case["chosen"]  # by the file alone
    (ended,) = case["ended"]
    took, how, choice = ended.splitlines()
    assert re.fullmatch(r"Parallel DiT: [\d.]+ s, ([\d.]+ x one rank|[\d.]+ s a step)", took)
    assert how.startswith("exact, on ")
    assert f"Parallel DiT: {choice}" == case["said"], "the choice stays below the run's time"
    assert case["files"] == 1
    assert case["inside"]
    assert case["key"]["class"].startswith("Flux {")
    assert case["key"]["dtype"] == "fp32"


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
