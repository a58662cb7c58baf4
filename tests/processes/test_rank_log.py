"""Ranks' logs: their folders and their ends."""

from parallel_backend.processes import rank_log
from parallel_backend.processes.rank_log import KEPT, STACK_LINES, TAIL_LINES, new_log_folder, tail


def test_each_pool_has_its_own_logs_and_old_ones_go(tmp_path, monkeypatch):
    times = iter(f"20260101-{number:06}" for number in range(KEPT + 2))
    monkeypatch.setattr(rank_log.time, "strftime", lambda _form: next(times))
    logs = tmp_path / "a folder" / "logs"
    logs.mkdir(parents=True)
    (logs / "notes").mkdir()
    folders = [new_log_folder(logs) for _ in range(KEPT + 2)]
    assert {path for path in logs.iterdir() if path.name != "notes"} == set(folders[1:])
    monkeypatch.setattr(rank_log.time, "strftime", lambda _form: folders[-1].name[:15])
    assert new_log_folder(logs) not in folders
    assert (logs / "notes").exists()


def test_the_end_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_text("\n".join(f"line {number}" for number in range(100_000)))
    assert tail(log).splitlines() == [f"line {number}" for number in range(100_000 - TAIL_LINES, 100_000)]
    stack = ["Thread 0x1 (most recent call first):", '  File "other"', "", "Current thread 0x2 (most recent call first):"]
    log.write_text("\n".join(["before"] * 50 + stack + [f'  File "{number}"' for number in range(100)]))
    lines = tail(log).splitlines()
    assert lines[:2] == ["Current thread 0x2 (most recent call first):", '  File "0"']
    assert len(lines) == STACK_LINES
