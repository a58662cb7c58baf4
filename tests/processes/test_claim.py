"""Folders of processes that were killed: the next start removes them, and no other one's."""

import os
import signal
import tempfile
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from parallel_backend.processes import claim, rank_log
from parallel_backend.processes.claim import CLAIM, Claim, is_claimed, remove_abandoned
from parallel_backend.processes.local import FOLDER_PREFIX, LocalRanks
from parallel_backend.processes.rank_log import KEPT, LogFolder
from parallel_backend.wire.rank_settings import StartSettings
from tests.processes.test_forked import comfyui, ranks_of
from tests.support.idle_rank import idle

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
