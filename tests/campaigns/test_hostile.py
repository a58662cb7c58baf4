"""A cross-section of `python -m tests.campaigns.hostile`."""

import json
import random

import pytest

from testing.thread_ranks import thread_ranks
from tests.campaigns.hostile import files, hosted, requests
from tests.campaigns.hostile.__main__ import degrees, own_degrees
from tests.campaigns.hostile.verdict import Tally, ranks_of, run
from tests.comfyui.conftest import comfyui  # noqa: F401 (a fixture)
from tests.support.planted_comfyui import planted_comfyui

SEED = 1


@pytest.fixture(scope="module")
def ranks():
    with thread_ranks() as start, ranks_of(start) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("packed", 24), ("ggufs", 8)])
def test_quantised_files_are_named_or_run(ranks, tmp_path, kind, count):
    tally = run(kind, getattr(files, kind)(tmp_path), count, SEED, ranks, own_degrees)
    assert not tally.defects, tally.defects
    assert {"refused", "run"} <= set(tally.outcomes), tally


@pytest.mark.slow
def test_single_files_are_named_or_run(ranks, tmp_path):
    tally = run("singles", files.singles(tmp_path), 12, SEED, ranks, degrees)
    assert not tally.defects, tally.defects
    assert tally.outcomes["refused"]


@pytest.mark.slow
def test_files_of_own_classes_are_named_or_run(ranks, tmp_path):
    with planted_comfyui():
        tally = run("own classes", files.own_classes(tmp_path), 20, SEED, ranks, own_degrees)
    assert not tally.defects, tally.defects
    assert tally.outcomes["refused"]


def of_lora(**found):
    return {"lives": True, "not finite": False, "rank": False, "seconds": 0.1, "bytes": 1} | found


REFUSED = {"kind": "ValueError", "text": "model: a LoRA without a rank", "cause": ""}


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (of_lora(far=1e-6, most=1.0), "run, and right"),
        (of_lora(far=0.1, most=1.0), "run, and wrong"),
        (of_lora(far=None, most=1.0), "run"),
        (of_lora(**REFUSED), "refused"),
        (of_lora(**REFUSED | {"text": "a LoRA"}), "unnamed"),
        (of_lora(**REFUSED | {"text": "model: \x1b[2J"}), "unnamed"),
        (of_lora(**REFUSED | {"text": "model: " + "x" * 3000}), "unnamed"),
        (of_lora(**REFUSED | {"cause": "x\ny"}), "unnamed"),
        (of_lora(**REFUSED | {"kind": "KeyError"}), "unnamed"),
        (of_lora(**REFUSED | {"kind": "KeyError"}, theirs="KeyError: 'x'"), "refused by ComfyUI"),
        (of_lora(**REFUSED | {"kind": "NotFiniteError", "not finite": True}), "run, not finite, and named"),
        (of_lora(**REFUSED | {"kind": "RankError", "rank": True}), "rank ended"),
        (of_lora(far=1e-6, most=1.0) | {"lives": False}, "rank ended"),
        ({"error": "x", "traceback": "y"}, "unnamed"),
    ],
)
def test_what_comes_of_a_lora_is_judged_by_its_words_and_by_comfyuis_own_model(found, outcome):
    hosted.judge_lora(tally := Tally("LoRA"), 7, found)
    assert tally.outcomes == {outcome: 1}
    assert set(tally.defects) == ({7} if outcome in ("run, and wrong", "unnamed", "rank ended") else set())


@pytest.mark.parametrize(
    ("status", "reply", "outcome"),
    [
        (200, {"devices": 2, "why": "", "loaders": [{"why": ""}]}, "answered"),
        (400, {"error": "loaders: each needs inputs."}, "refused"),
        (400, {"error": "inputs?"}, "unnamed"),
        (500, "Server got itself in trouble", "unnamed"),
        (200, {"devices": 2, "why": "", "loaders": [{"why": "\x1b"}]}, "unnamed"),
        (413, "too large", "refused by ComfyUI"),
    ],
)
def test_a_reply_is_a_plan_or_says_what_was_expected(status, reply, outcome):
    hosted.judge_reply(tally := Tally("bodies"), 0, status, json.dumps(reply).encode())
    assert tally.outcomes == {outcome: 1}


def test_requests_are_made_from_their_number_alone():
    one, other = ([requests.body(random.Random(f"0 {n}")) for n in range(50)] for _ in range(2))
    assert one == other and len(set(one)) > 40
    one, other = ([requests.workflow(random.Random(f"0 {n}")) for n in range(50)] for _ in range(2))
    assert repr(one) == repr(other) and len({each.changed for each in one}) > 10


@pytest.mark.full
@pytest.mark.comfyui
def test_lora_files_are_named_or_right(comfyui, tmp_path):  # noqa: F811
    tally = hosted.run_loras(comfyui, tmp_path, 16, SEED)
    assert not tally.defects, tally.defects
    assert {"refused", "run, and right"} <= set(tally.outcomes), tally


@pytest.mark.full
@pytest.mark.comfyui
def test_workflows_and_requests_are_named_or_right(comfyui, tmp_path):  # noqa: F811
    with hosted.server_of(comfyui, tmp_path) as server:
        host = hosted.Host(server)
        for tally in (host.workflows(40, SEED), host.bodies(24, SEED)):
            assert not tally.defects, tally.defects
            assert "refused" in tally.outcomes, tally
