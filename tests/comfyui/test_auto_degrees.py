"""`degrees` auto in a real ComfyUI: what is chosen, that the picture is that of the same degrees by hand, and the server."""

import copy
import re

import numpy as np
import pytest

from tests.comfyui.conftest import unselected
from tests.comfyui.test_server import LOADER, pixels, small

pytestmark = pytest.mark.comfyui


CASES = (
    *("batches", "tokens", "displaced", "pipefusion_unused", "sampler_node", "kept", "ulysses_config", "unloads"),
    *("cancelled", "advised", "nothing_fits", "for_real", "pipefusion", "by_hand_first", "slow_links", "one_device"),
)


@pytest.fixture(scope="module")
def ran(request, inside):
    return inside.run("auto", skip=unselected(request, "case", of=((case,) for case in CASES)))


@pytest.fixture
def case(request, ran) -> dict:
    """What inside/auto.py found of a case."""
    found = ran[0][request.param]
    assert "error" not in found, found["traceback"]
    return found


def of(name: str, *marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """The decorator of a test of this case."""
    assert name in CASES
    return pytest.mark.parametrize("case", [pytest.param(name, marks=marks)], indirect=True)


BOTH, ONE = ["cpu", "cpu"], ["cpu"]


@of("batches")
def test_two_prompts_go_side_by_side(case):
    assert case["before"] == ["one rank", ONE]  # nothing is known before the first run
    assert case["chosen"] == ["split_batch_degree 2", BOTH]
    assert case["difference"] == 0
    assert case["said"].startswith("Parallel DiT: degrees auto: split_batch_degree 2 on cpu, cpu, planned ")


@of("tokens", pytest.mark.full)
def test_one_prompt_shares_its_tokens(case):
    degrees, devices = case["chosen"]
    assert degrees in ("ulysses_degree 2", "ring_degree 2", "tensor_parallel_degree 2")
    assert devices == BOTH
    assert case["difference"] == 0


@of("slow_links", pytest.mark.full)
def test_slow_links_leave_one_device(case):
    assert case["chosen"] == ["one rank", ONE]
    assert case["difference"] == 0


@of("pipefusion")
def test_pipefusion_is_taken_where_it_is_applied_and_nowhere_else(case):
    assert case["chosen"] == case["again"] == ["pipefusion_degree 2", BOTH]
    assert case["without"] == ["one rank", ONE]
    assert case["difference"] == 0
    assert case["measured"] == 1


@of("displaced", pytest.mark.full)
def test_displaced_patches_are_taken_where_they_are_faster_than_both(case):
    assert case["chosen"] == ["patch_degree 2", BOTH]
    assert case["difference"] == 0


@of("pipefusion_unused", pytest.mark.full)
def test_where_an_exact_mode_is_faster_nothing_runs_in_bands(case):
    assert "pipefusion" not in case["chosen"][0]
    assert case["chosen"][1] == BOTH
    assert case["difference"] == 0


@of("sampler_node", pytest.mark.full)
def test_pipefusion_sampler_reports_the_degrees_that_were_chosen(case):
    assert case["chosen"] == ["pipefusion_degree 2", BOTH]
    assert "pipefusion_degree 2" in case["report"]
    assert "pipelined in 4 bands" in case["report"]


@of("kept")
def test_the_plan_is_kept_until_the_model_is_unloaded(case):
    assert case["first"] != ["split_batch_degree 2", BOTH]
    assert case["ours"] == [case["first"]] * 2
    assert case["same"]
    assert case["after"] == ["split_batch_degree 2", BOTH]  # for the two prompts of that run
    assert case["measured"] == 1


@of("by_hand_first", pytest.mark.full)
def test_degrees_by_hand_are_no_plan(case):
    assert case["chosen"] == ["one rank", ONE]


@of("one_device")
def test_one_device_needs_no_calibration(case):
    assert case["chosen"] == case["auto"] == ["one rank", ONE]
    assert case["measured"] == 0


@of("ulysses_config", pytest.mark.full)
def test_ulysses_config_says_how_attention_is_computed_and_no_more(case):
    assert case["chosen"] == ["split_batch_degree 2", BOTH]
    assert case["attention"] == "sdpa"


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
    assert case["key"]["family"].startswith("Flux {")
    assert case["key"]["dtype"] == "fp32"
    assert case["difference"] == 0


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


@of("unloads", pytest.mark.full)
def test_comfyuis_button_unloads_what_was_chosen(case):
    assert case["held"] > 0
    assert case["left"] == 0


@of("cancelled")
def test_cancel_while_calibrating(case):
    assert case["stopped"]
    assert case["chosen"] == ["split_batch_degree 2", BOTH]


def test_stages_by_hand_are_refused(ran):
    assert "stage_split is '3,2', for stages that are not known while degrees is auto" in ran[0]["stages_by_hand"]["error"]


@of("nothing_fits", pytest.mark.full)
def test_where_nothing_fits_what_needs_least_is_tried_and_said(ran, case):
    degrees, devices = case["chosen"]
    assert degrees in ("pipefusion_degree 2", "tensor_parallel_degree 2")  # either rank has half of the weights
    assert devices == BOTH
    assert "nothing fits these devices by its estimate" in ran[1]


@pytest.mark.full
def test_on_the_server(server):
    """The bundled workflow with auto, then with the degrees that it said."""
    prompt = small(seed=77, num_pipeline_patch=0, stage_split="even")
    prompt[LOADER]["inputs"] |= {"degrees": "auto", "pipefusion_degree": 64}
    start = server.log.stat().st_size
    ours = server.run(prompt)
    assert ours.status == "success", ours.error
    with server.log.open("rb") as log:
        log.seek(start)
        (line,) = [line for line in log.read().decode(errors="replace").splitlines() if "degrees auto: " in line]
    hand = copy.deepcopy(prompt)
    hand[LOADER]["inputs"] |= {"degrees": "as set", "pipefusion_degree": 1, "devices": "cpu"}
    config = {"ulysses_degree": 1, "ring_degree": 1, "patch_mode": "none", "patch_degree": 1, "attention": "auto"}
    if "patch_degree 2" in line:
        config["patch_mode"] = "displaced"
    for widget in (*config, "pipefusion_degree", "tensor_parallel_degree", "split_batch_degree"):
        if f" {widget} 2" in line:
            (config if widget in config else hand[LOADER]["inputs"])[widget] = 2
            hand[LOADER]["inputs"]["devices"] = "cpu,cpu"
    hand["20"] = {"class_type": "UlyssesConfig", "inputs": {**config, "comm_overlap": True}}
    hand[LOADER]["inputs"]["parallel_config"] = ["20", 0]
    theirs = server.run(hand)
    assert theirs.status == "success", theirs.error
    assert np.array_equal(pixels(ours.images[0]), pixels(theirs.images[0]))
