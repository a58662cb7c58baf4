"""How many threads ranks may have: cores of a machine, of a process that is held to some of them, of a container."""

from types import SimpleNamespace

import pytest

from parallel_backend.core import cores
from parallel_backend.core.cores import quotas_of, usable_cores


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(allowed, files)`: Linux on 64 cores of which the process may use `allowed`, with these files of its group."""
    membership = tmp_path / "membership"

    def make(allowed: int, files: dict[str, str], path: str = "/") -> None:
        membership.write_text(f"0::{path}\n")
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        linux = SimpleNamespace(cpu_count=lambda: 64, sched_getaffinity=lambda _process: set(range(allowed)))
        monkeypatch.setattr(cores, "os", linux)
        monkeypatch.setattr(cores, "sys", SimpleNamespace(platform="linux"))
        monkeypatch.setattr(cores, "MEMBERSHIP", membership)
        monkeypatch.setattr(cores, "CONTROL_GROUPS", tmp_path)

    return make


@pytest.mark.parametrize(
    ("allowed", "files", "expected"),
    [
        (64, {}, 64),
        (64, {"cpu.max": "800000 100000\n"}, 8),
        (4, {"cpu.max": "800000 100000\n"}, 4),
        (64, {"cpu.max": "50000 100000\n"}, 1),
        (64, {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
    ],
)
def test_cores_are_those_that_the_process_may_use(machine, allowed, files, expected):
    machine(allowed, files, "/a/b")
    assert usable_cores() == expected


def test_groups_of_version_1(tmp_path):
    folder = tmp_path / "cpu" / "docker"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_period_us").write_text("50000\n")
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    membership = "4:cpu,cpuacct:/docker\n3:cpuset:/other\n"
    assert list(quotas_of(membership, tmp_path)) == []
    (folder / "cpu.cfs_quota_us").write_text("150000\n")
    assert list(quotas_of(membership, tmp_path)) == [3.0]
    assert list(quotas_of("4:memory:/docker\n", tmp_path)) == []


def test_where_there_is_no_linux_the_machine_counts(monkeypatch):
    monkeypatch.setattr(cores, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(cores, "os", SimpleNamespace(cpu_count=lambda: None))
    assert usable_cores() == 1
