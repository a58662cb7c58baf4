"""A cross-section of `python -m tests.campaigns.fuzz`, and that its runner sees what is wrong."""

import contextlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from parallel_backend.planning import calibration_file as cache
from parallel_backend.wire import encoding
from parallel_backend.wire import messages as m
from tests.campaigns.fuzz import files, messages, ranks, runner, settings
from tests.campaigns.fuzz.__main__ import SHARES, calibration
from tests.wire.test_messages import MESSAGES

ROOT = Path(__file__).resolve().parents[2]
SEED = 1


@pytest.fixture(scope="module")
def models():
    return files.sound_models()


def sound(report: runner.Report, *outcomes: str) -> None:
    """No defects, and each of these came of some case: otherwise the cases would all be of one kind."""
    assert not report.defects, next(iter(report.defects.values()))
    assert set(outcomes) <= set(report.outcomes), report


def test_headers_of_messages():
    sound(runner.run("headers", messages.headers(MESSAGES), 1500, SEED), "refused", "read")


def test_streams_of_messages():
    sound(runner.run("streams", messages.streams(MESSAGES), 500, SEED), "refused", "ended")


@pytest.mark.slow
def test_safetensors(models, tmp_path):
    sound(runner.run("safetensors", files.safetensors(models, tmp_path), 200, SEED), "refused", "opened")


@pytest.mark.slow
def test_gguf(models, tmp_path):
    sound(runner.run("gguf", files.gguf(models, tmp_path), 200, SEED), "refused", "opened")


def test_calibrations(tmp_path):
    sound(runner.run("calibrations", files.calibrations(calibration(), tmp_path), 200, SEED), "measured anew")


def test_settings():
    sound(runner.run("settings", settings.make, 400, SEED), "refused", "taken", "cut", "planned")


@pytest.mark.slow
def test_bytes_from_a_rank():
    sound(runner.run("client", ranks.into_client(MESSAGES), 40, SEED), "refused", "ended")


@pytest.mark.processes
def test_bytes_to_a_rank():
    sound(runner.run("rank", ranks.into_rank(MESSAGES), 8, SEED), "no message")


@pytest.mark.full
def test_the_command_counts_and_says_so(tmp_path):
    out = tmp_path / "result.json"
    kinds = "headers of messages,settings,calibrations"
    command = [sys.executable, "-m", "tests.campaigns.fuzz", "--count", "200", "--only", kinds, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["cases"] == sum(kind["cases"] for kind in found["kinds"].values()) == 84
    assert found["defects"] == 0
    assert f"{found['cases']} cases" in done.stdout


def test_all_kinds_make_the_whole():
    assert sum(SHARES.values()) == pytest.approx(1.0)


# The controls: what the runner is there to see.


def one(case) -> runner.Report:
    return runner.run("control", lambda rng: case, 1, SEED)


def test_an_exception_is_a_defect():
    report = one(lambda: [][0])
    assert "IndexError" in report.defects[0]
    assert report.count == 1


def test_a_hang_is_a_defect(monkeypatch):
    monkeypatch.setattr(runner, "SECONDS", 0.2)
    report = one(lambda: time.sleep(60))
    assert "Hang" in report.defects[0]


def test_an_allocation_without_bounds_is_a_defect():
    def allocate() -> str:
        torch.empty(1 << 34, dtype=torch.uint8)
        return "allocated"

    assert not one(allocate).defects
    with runner.little_memory():
        assert "RuntimeError" in one(allocate).defects[0]


def test_a_decoder_that_believes_everything_is_a_defect(monkeypatch):
    """As it was: tensors are made when the header is read."""

    def eager(self, value):
        tensor = torch.empty(value[1], dtype=torch.float32)
        self.append(encoding.Pending(tensor, value[1], tensor.nbytes))
        return tensor

    monkeypatch.setattr(encoding._Arriving, "add", eager)
    report = runner.run("headers", messages.headers(MESSAGES), 300, SEED)
    assert report.defects


@pytest.mark.slow
def test_a_reader_that_lets_other_errors_out_is_a_defect(models, tmp_path, monkeypatch):
    def careless(path):
        raise KeyError(path)

    monkeypatch.setattr(files, "open_checkpoint", careless)
    assert len(runner.run("safetensors", files.safetensors(models, tmp_path), 3, SEED).defects) == 3


def test_a_cache_that_is_believed_is_a_defect(tmp_path, monkeypatch):
    make = files.calibrations(calibration(), tmp_path)
    monkeypatch.setattr(cache, "load", lambda path, key: json.loads(path.read_text()))
    assert runner.run("calibrations", make, 20, SEED).defects


def test_a_client_that_takes_any_rank_s_word_is_a_defect(monkeypatch):
    """An Output of rank 7, which there is none of, is not noticed: the case that sees it fails."""
    from parallel_backend.processes.pool import Pool, RankError, wait_for

    def said(data: bytes) -> str:
        played = ranks.Played(data)
        pool = Pool(("cpu",), start=played.start, silence=ranks.SILENCE)
        try:
            wait_for(pool.ask(m.Unload(), m.Unloaded), ranks.within(ranks.ERROR_SECONDS))
            return "goes on"
        except RankError as error:
            return str(error)
        finally:
            pool.close(politely=False)

    wrong = messages.frames(m.Output(7, 1, torch.zeros(1)))
    assert "rank 0 (cpu) sent what cannot be: Output of rank 7" in said(wrong)
    monkeypatch.setattr(Pool, "_hand_on", unchecked(Pool._hand_on))
    assert said(wrong) == "goes on"


def unchecked(hand_on):
    """Pool._hand_on without its look at the rank's number."""

    def taken(self, rank, message, request_id, model):
        with contextlib.suppress(m.BadMessage):
            hand_on(self, rank, message, request_id, model)

    return taken


def test_a_case_is_made_from_its_number_alone(models, tmp_path):
    for make in (messages.headers(MESSAGES), messages.streams(MESSAGES), files.safetensors(models, tmp_path)):
        first, second = (runner.run("same", make, 40, SEED).outcomes for _ in range(2))
        assert first == second
    assert messages.header(random.Random(1), MESSAGES) == messages.header(random.Random(1), MESSAGES)
