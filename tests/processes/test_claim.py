"""Folders of processes that were killed: the next start removes them, and no other one's."""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from parallel_backend.processes import claim, rank_log
from parallel_backend.processes.claim import CLAIM, UNLOCKED, Claim, is_claimed, remove_abandoned
from parallel_backend.processes.local import FOLDER_PREFIX, LocalRanks
from parallel_backend.processes.rank_log import KEPT, LogFolder
from parallel_backend.wire.rank_settings import StartSettings
from tests.processes.test_forked import comfyui, ranks_of
from tests.support.idle_rank import idle

ROOT = Path(__file__).resolve().parents[2]
START = StartSettings(("cpu",), 1, timedelta(minutes=1))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_claim_is_there_until_it_is_released(tmp_path):
    assert not is_claimed(tmp_path)
    mark = Claim(tmp_path)
    assert is_claimed(tmp_path)
    assert names(tmp_path) == [CLAIM]
    mark.release()
    mark.release()
    assert not is_claimed(tmp_path)
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_locked_is_used_without_a_claim(tmp_path, monkeypatch):
    def fail(_handle):
        raise OSError("no locks on this drive")

    monkeypatch.setattr(claim, "_lock", fail)
    mark = Claim(tmp_path)
    assert names(tmp_path) == []
    mark.release()
    assert not (tmp_path / UNLOCKED).exists()


def test_only_folders_whose_process_is_gone_are_removed(tmp_path, monkeypatch):
    living, killed, unmarked, foreign = (tmp_path / name for name in ("living", "killed", "unmarked", "foreign"))
    for folder in (living, killed, unmarked, foreign):
        folder.mkdir()
    (killed / "store").touch()
    mark = Claim(living)
    for folder in (killed, foreign):
        (folder / CLAIM).touch()
    link = tmp_path / "link"
    link.symlink_to(foreign)
    exists = Path.exists

    def allowed(path):
        if path.parent in (foreign, link):
            raise PermissionError(path)
        return exists(path)

    monkeypatch.setattr(Path, "exists", allowed)
    monkeypatch.setattr(claim, "_is_ours", lambda folder: folder not in (foreign, link))
    remove_abandoned(sorted(tmp_path.iterdir()))
    monkeypatch.undo()
    assert names(tmp_path) == ["foreign", "link", "living", "unmarked"]
    mark.release()


def test_a_folder_that_goes_while_it_is_looked_at_does_not_hinder_a_start(tmp_path):
    """As when another process removes its own, or the same one."""
    (killed := tmp_path / "killed").mkdir()
    (killed / CLAIM).touch()
    remove_abandoned([tmp_path / "gone", killed])
    assert names(tmp_path) == []


@pytest.mark.processes
@pytest.mark.usefixtures("spawned")
def test_what_a_killed_client_and_its_killed_ranks_left_is_removed_at_the_next_start(tmp_path, monkeypatch):
    """As by the system, for want of memory."""
    with comfyui(tmp_path, "print('started', flush=True)\ntime.sleep(600)") as process:
        process.stdout.readline()
        pids = [process.pid, *ranks_of(process.pid)]
        for pid in reversed(pids):  # the ranks could remove the folder
            os.kill(pid, signal.SIGSTOP)
        for pid in pids[::-1]:
            os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid) for pid in pids[1:] if psutil.pid_exists(pid)], timeout=10)
    assert len(list(tmp_path.glob(f"{FOLDER_PREFIX}*"))) == 1  # the control
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ranks = LocalRanks(START, idle)
    assert list(tmp_path.glob(f"{FOLDER_PREFIX}*")) == [ranks.directory]
    ranks.kill()
    assert not list(tmp_path.glob(f"{FOLDER_PREFIX}*"))


# Folders for logs.


def test_each_pool_has_its_own_logs_and_old_ones_go(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_log.time, "strftime", lambda _form: "20260101-120000")
    logs = tmp_path / "a folder" / "logs"
    first, *others = (LogFolder(logs) for _ in range(KEPT + 3))
    assert len({folder.path for folder in (first, *others)}) == KEPT + 3
    for folder in others:
        folder.release()
    (logs / "rank-0.log").touch()  # an earlier version's
    (logs / "notes").mkdir()
    last = LogFolder(logs)
    kept = [folder.path.name for folder in others if folder.path.exists()]
    assert first.path.exists()  # the oldest, whose pool lives
    assert len(kept) == KEPT
    assert {*names(logs)} == {first.path.name, last.path.name, *kept, "rank-0.log", "notes"}
    first.release()
    last.release()


@pytest.mark.processes
def test_logs_of_two_comfyuis_on_one_folder_stay_apart(tmp_path):
    """However many pools the one has started, the other's stay while it lives."""
    code = (
        "import sys; from pathlib import Path; from parallel_backend.processes.rank_log import LogFolder\n"
        "folder = LogFolder(Path(sys.argv[1])); print(folder.path, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        others = Path(other.stdout.readline().strip())
        for _ in range(KEPT + 2):
            LogFolder(tmp_path).release()
        assert others.exists()
        other.stdin.close()
        other.wait(30)
        for _ in range(KEPT + 2):
            LogFolder(tmp_path).release()
        assert not others.exists()


@pytest.mark.processes
@pytest.mark.usefixtures("spawned")
def test_the_end_of_a_log_is_that_of_the_ranks_own(tmp_path):
    first, second = LocalRanks(replace(START, logs=tmp_path), idle), None
    try:
        second = LocalRanks(replace(START, logs=tmp_path), idle)
        assert first.logs != second.logs
        (second.logs / "rank-0.log").write_text("CUDA out of memory")
        (first.logs / "rank-0.log").write_text("all is well")
        assert first.log_tail(0) == "all is well"
    finally:
        for ranks in filter(None, (first, second)):
            ranks.kill()
    assert first.logs.is_dir() and second.logs.is_dir()
