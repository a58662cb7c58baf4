"""Whether the process that started this one lives, as the system tells it or not."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel_backend.core.parent_process import ParentProcess

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def other():
    """Another process than this one's parent, and the reading end of a pipe that nobody closes."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        reading, writing = os.pipe()
        yield SimpleNamespace(pid=process.pid, sentinel=reading), process
        for end in (reading, writing):
            os.close(end)
        process.kill()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux")
def test_it_is_known_by_its_id_although_its_pipes_stay_open(other):
    parent, process = other
    seen = ParentProcess(parent)
    assert not seen.has_ended()
    process.send_signal(signal.SIGKILL)
    assert seen.has_ended(10.0)
    process.wait()
    assert ParentProcess(parent).has_ended()  # it had ended before


def test_where_the_system_does_not_tell_an_orphan_is_known_by_its_new_parent(other, monkeypatch):
    def refuse(_pid):
        raise PermissionError("not in this container")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    parent, process = other
    seen = ParentProcess(parent)
    monkeypatch.setattr(os, "getppid", lambda: process.pid)
    assert not seen.has_ended()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert seen.has_ended()
