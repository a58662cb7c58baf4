"""The soak's own plan and its checks: each must report what it is there for, and nothing where all is well."""

import json
import mmap
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import numpy as np
import psutil
import pytest

from tests.campaigns.soak import processes
from tests.campaigns.soak.processes import Watch, shared_segments
from tests.campaigns.soak.record import CANCELLED, DELETED, EMPTY, FAILED, FINISHED, SERVER, Ending, Reading, Soak
from tests.campaigns.soak.report import table, write
from tests.campaigns.soak.requests import Prompt, draw, prompt
from tests.campaigns.soak.schedule import BOTH, DELETE, DOCTOR, FREE, SETTLED, UNLOAD, Batch, Turn
from tests.campaigns.soak.session import Reference, Run, difference
from tests.campaigns.soak.setups import OTHER_RANKS, TWO_RANKS
from tests.campaigns.soak.soak import plan_of
from tests.campaigns.soak.verdict import problems, trends

WINDOW, ROUNDS = 20, 8
LIVED = WINDOW * ROUNDS


def ending(number: int, **changes) -> Ending:
    return Ending(**{"number": number, "request": "pipe 0", "setup": "pipe", "cancel": "", "status": FINISHED} | changes)


def reading(number: int, role: str, pid: int, **changes) -> Reading:
    """As real ones, memory goes up and down by a per cent."""
    held = round(3e8 * (1 + 0.01 * (number // 3 % 3 - 1)))
    state = ("pipe", "ulysses", EMPTY)[number % 3]
    counts = {"descriptors": 20 + number % 2, "threads": 9, "shared": 0, "files": 1, "file_bytes": 1000}
    return Reading(
        **{"number": number, "state": state, "role": role, "pid": pid, "uss": held, "rss": held, "allocated": held}
        | counts
        | changes
    )


def clean() -> Soak:
    found = Soak(0, WINDOW, LIVED)
    found.endings = [ending(number, seconds=1.0, difference=0.0) for number in range(1, LIVED + 1)]
    roles = {SERVER: 10, "rank 0": 11, "rank 1": 12}
    found.readings = [reading(n, role, pid) for n in range(1, LIVED + 1) for role, pid in roles.items()]
    return found


def change_readings(soak: Soak, role: str, change) -> None:
    soak.readings = [replace(one, **change(one)) if one.role == role else one for one in soak.readings]


def test_a_clean_soak_has_no_problems():
    found = clean()
    assert problems(found) == []
    assert [trend.growth for trend in trends(found)] == [pytest.approx(0, abs=0.01)] * 3


ENDINGS = {
    "unequal": ({"difference": 1e-7}, "differs from the same request alone by 1e-07"),
    "not computed": ({"computed": False}, "was not computed"),
    "error": ({"status": FAILED, "difference": None, "error": "KSampler: broken"}, "KSampler: broken"),
    "nobody's cancel": ({"status": CANCELLED, "difference": None, "where": "KSampler"}, "was cancelled in KSampler"),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_a_prompt_that_ended_wrong_is_reported(case):
    changes, said = ENDINGS[case]
    found = clean()
    found.endings[30] = replace(found.endings[30], **changes)
    (text,) = problems(found)
    assert text.startswith("prompt 31 (pipe 0): ")
    assert said in text


def test_what_was_cancelled_or_deleted_on_purpose_is_no_problem():
    found = clean()
    found.endings[5] = replace(found.endings[5], status=CANCELLED, cancel="interrupt", difference=None, where="KSampler")
    found.endings[6] = replace(found.endings[6], status=DELETED, cancel=DELETE, difference=None)
    assert problems(found) == []


@pytest.mark.parametrize("role", [SERVER, "rank 1"])
def test_a_leak_is_reported(role):
    """3 % over the whole soak, no more than it goes up and down by itself."""
    found = clean()
    change_readings(found, role, lambda one: {"allocated": round(one.allocated * (1 + 0.05 * one.number / LIVED))})
    (text,) = problems(found)
    assert text.startswith(f"{role} grew by ")


def test_what_models_hold_is_no_growth():
    """How many there are depends on what came before."""
    found = clean()
    late = LIVED - WINDOW
    more = {"allocated": 400_000_000, "descriptors": 40, "threads": 20}
    change_readings(found, "rank 0", lambda one: more if one.state != EMPTY and one.number > late else {})
    assert problems(found) == []
    growth = {trend.role: trend.states["pipe"][1] / trend.states["pipe"][0] - 1 for trend in trends(found)}
    assert growth["rank 0"] > 0.3 > abs(growth["rank 1"])


def test_a_leak_that_only_a_long_life_would_show_is_not_judged_by_a_short_one():
    found = clean()
    found.lived = SETTLED + WINDOW
    assert all(trend.growth is None for trend in trends(found))


@pytest.mark.parametrize("what", ["descriptors", "threads"])
def test_a_count_that_grows_is_reported(what):
    found = clean()
    late = LIVED - WINDOW
    change_readings(
        found, "rank 0", lambda one: {what: getattr(one, what) + (3 if one.state == EMPTY and one.number > late else 0)}
    )
    (text,) = problems(found)
    assert text.startswith("rank 0 has ")
    assert f" {what} with nothing loaded, " in text


def test_what_remains_is_reported():
    found = clean()
    found.left = ["process 12: python"]
    change_readings(found, "rank 0", lambda one: {"shared": 1})
    change_readings(found, "rank 1", lambda one: {"files": 2})
    found.failures = ["doctor after prompt 20: broken"]
    texts = problems(found)
    assert texts[0] == "doctor after prompt 20: broken"
    assert texts[-1] == "left after the end: process 12: python"
    assert any("rank 0 has 1 segments" in text for text in texts)
    assert any("2 temporary files" in text for text in texts)


def test_report(tmp_path):
    found = clean()
    found.endings[3] = replace(found.endings[3], difference=0.5)
    lines = table(found).splitlines()
    (row,) = (line for line in lines if line.startswith("pipe "))
    assert row.split() == ["pipe", "160", "160", "0", "0", "0", "160", "1", "1.0", "s"]
    write(found, tmp_path / "soak.json")
    saved = json.loads((tmp_path / "soak.json").read_text())
    assert saved["problems"] == problems(found)
    assert len(saved["trends"]) == 3
    assert (tmp_path / "soak.png").stat().st_size > 10_000


PIXELS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (PIXELS.copy(), 0.0),
        (PIXELS + np.float32(0.5), 0.5),
        (PIXELS.astype(np.float64), np.inf),
        (PIXELS.reshape(3, 2), np.inf),
        (PIXELS * np.float32("nan"), np.inf),
    ],
)
def test_difference(other, expected):
    assert difference((PIXELS,), (other,)) == expected


def test_difference_is_by_bits():
    negative = PIXELS.copy()
    negative[0, 0] = -0.0
    assert difference((PIXELS,), (negative,)) > 0
    assert difference((PIXELS,), (PIXELS, PIXELS)) == np.inf


@pytest.mark.parametrize("prompts", [25, 150, 500])
def test_plan(prompts):
    plan = plan_of(prompts, seed=0)
    assert plan == plan_of(prompts, seed=0)
    assert plan != plan_of(prompts, seed=1)
    turns = [turn for batch in plan.batches for turn in batch.turns]
    assert len(turns) == prompts
    rounds = [turns[start : start + plan.window] for start in range(0, plan.lived, plan.window)]
    names = [{turn.request.name for turn in some if not turn.cancel} for some in rounds]
    assert all(found == names[0] for found in names)
    assert {turn.request.setup for turn in rounds[0]} == set(TWO_RANKS)
    assert {turn.request.setup for turn in turns} == {*TWO_RANKS, *OTHER_RANKS}
    assert 0.08 < sum(turn.cancel != "" for turn in turns) / len(turns) < 0.3
    afterwards = [batch.after for batch in plan.batches]
    assert afterwards.count(BOTH) >= len(rounds)
    assert prompts < 100 or {UNLOAD, FREE} < {*afterwards}
    assert 1 <= afterwards.count(DOCTOR) <= 2


def test_nothing_is_new_after_the_warm_up():
    """What is loaded at first use would be growth."""
    plan, before, doctor = plan_of(500, seed=0), [], False
    for batch in plan.batches:
        if len(before) + len(batch.turns) > SETTLED:
            break
        before += batch.turns
        doctor |= batch.after == DOCTOR
    assert {turn.request.setup for turn in before} == set(TWO_RANKS)
    assert doctor
    assert any(turn.trace for turn in before)


def test_in_rounds_no_prompt_is_cancelled_that_has_ranks_load():
    plan = plan_of(500, seed=0)
    before, seen = Batch((), UNLOAD), 0
    for batch in plan.batches:
        if seen >= plan.lived:
            break
        seen += len(batch.turns)
        loaded = before.turns[-1].request.setup if before.turns and not before.after else None
        for turn in batch.turns[:1]:
            assert turn.request.setup == loaded or not turn.cancel
            assert {other.request.setup for other in batch.turns} == {turn.request.setup}
        before = batch


def test_requests_are_of_all_kinds():
    requests = draw(TWO_RANKS, 5, seed=0)
    assert len(requests) == len(set(requests)) == 5 * len(TWO_RANKS)
    assert len({request.size for request in requests}) >= 6
    assert len({request.sampler for request in requests}) >= 5
    assert len({sum(len(text.split()) for text in request.text) for request in requests}) >= 5
    assert {request.bands for request in requests if request.setup.bands} == {2, 3, 4}
    for flag in ("lora", "cache", "vae", "control", "in_sampler"):
        assert {bool(getattr(request, flag)) for request in requests} == {True, False}
    assert {request.batch for request in requests} == {1, 2}
    assert {request.cfg for request in requests} == {1.0, 3.0}


def test_a_serial_changes_nothing_but_the_samplers_denoise():
    for request in draw(TWO_RANKS, 2, seed=0):
        a, b = prompt(request), prompt(request, serial=10_000)
        assert 0.9999 < b.nodes[b.sampler]["inputs"]["denoise"] < 1
        b.nodes[b.sampler]["inputs"]["denoise"] = 1.0
        assert a == b


class OneAnswer:
    """In the place of a Session: every prompt ends in the same way."""

    def __init__(self, messages: list, arrays: tuple, entry: bool = True):
        self.messages, self.found, self.has_entry, self.posted = messages, arrays, entry, []
        self.server = SimpleNamespace(post=lambda path, body: self.posted.append((path, body)))

    def send(self, request, trace):
        return "id", Prompt({}, "5", "6", None)

    def wait(self, prompt_id):
        end = [["execution_start", {"timestamp": 1000}], *self.messages]
        return {"status": {"messages": end}} if self.has_entry else None

    def arrays(self, entry, made):
        return self.found


def told(session: OneAnswer, cancel: str = "") -> Ending:
    request = draw(TWO_RANKS, 1, seed=0)[0]
    run = Run(session, SimpleNamespace(read=lambda number, state: []), {request.name: Reference((PIXELS,), 0.1)}, clean())
    run.soak.endings.clear()
    run.batch(Batch((Turn(request, cancel, 0.1),)))
    (found,) = run.soak.endings
    return found


SUCCESS = [["execution_cached", {"nodes": ["1"], "timestamp": 1100}], ["execution_success", {"timestamp": 3000}]]


def test_a_finished_prompt_is_compared_with_the_reference():
    found = told(OneAnswer(SUCCESS, (PIXELS.copy(),)))
    assert (found.status, found.difference, found.computed, found.seconds) == (FINISHED, 0.0, True, 2.0)
    assert told(OneAnswer(SUCCESS, (PIXELS + np.float32(1),))).difference == 1.0


def test_an_answer_from_the_cache_is_seen():
    cached = [["execution_cached", {"nodes": ["1", "5"], "timestamp": 1100}], SUCCESS[1]]
    assert not told(OneAnswer(cached, (PIXELS,))).computed


@pytest.mark.slow
def test_a_cancelled_and_a_deleted_prompt():
    interrupted = [["execution_interrupted", {"node_type": "KSampler", "timestamp": 1500}]]
    session = OneAnswer(interrupted, ())
    found = told(session, "interrupt twice")
    assert (found.status, found.where, found.difference) == (CANCELLED, "KSampler", None)
    assert session.posted == [("/interrupt", {"prompt_id": "id"})] * 2
    session = OneAnswer([], (), entry=False)
    assert told(session, DELETE).status == DELETED
    assert session.posted == [("/queue", {"delete": ["id"]})]


@pytest.mark.slow
def test_a_failed_prompt():
    failed = [["execution_error", {"node_type": "KSampler", "exception_message": "broken\n", "timestamp": 1500}]]
    found = told(OneAnswer(failed, ()))
    assert (found.status, found.error) == (FAILED, "KSampler: broken")


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="no /dev/shm here")
def test_segments_of_shared_memory_are_seen():
    path = Path(f"/dev/shm/soak-test-{uuid4()}")
    assert str(path) not in shared_segments(psutil.Process())
    path.write_bytes(bytes(4096))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            assert str(path) in shared_segments(psutil.Process())
    finally:
        path.unlink()


@pytest.mark.slow
def test_what_outlives_the_server_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "END_SECONDS", 0.2)
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
    with subprocess.Popen([sys.executable, "-c", code]) as server:
        watch = Watch(SimpleNamespace(process=server), tmp_path)
        while not watch.main.children():
            assert server.poll() is None
        assert [reading.role for reading in watch.read(1, "pipe")] == [SERVER]
        server.kill()
        server.wait()
        (tmp_path / "store").touch()
        process, file = watch.left()
        (child,) = (one for one in watch.seen.values() if one.pid != server.pid)
        assert process.startswith(f"process {child.pid}: ")
        assert file == "temporary file store"
        child.kill()
        (tmp_path / "store").unlink()
        psutil.wait_procs([child], timeout=10)
        assert watch.left() == []
