"""The folders of ranks' logs."""

from parallel_backend.processes import rank_log
from parallel_backend.processes.rank_log import KEPT, new_log_folder


def test_each_pool_has_its_own_logs_and_old_ones_go(tmp_path, monkeypatch):
    times = iter(f"20260101-{number:06}" for number in range(KEPT + 2))
    monkeypatch.setattr(rank_log.time, "strftime", lambda _form: next(times))
    logs = tmp_path / "a folder" / "logs"
    logs.mkdir(parents=True)
    (logs / "notes").mkdir()
    folders = [new_log_folder(logs) for _ in range(KEPT + 2)]
    assert {path for path in logs.iterdir() if path.name != "notes"} == set(folders[1:])
    monkeypatch.setattr(rank_log.time, "strftime", lambda _form: folders[-1].name[:15])
    assert new_log_folder(logs).name == f"{folders[-1].name}-2"
    assert (logs / "notes").exists()
