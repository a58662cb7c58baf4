"""What of Windows' branches can be run elsewhere: the product's own code with the platform's name, and what it lacks."""

import ast
import ctypes
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.host_memory import host_memory
from parallel_backend.processes.local import LocalRanks
from parallel_backend.rank.comm.process_group import backend_for
from parallel_backend.rank.stage.store.device_copies import DeviceCopies
from parallel_backend.rank.start import parent_watch
from parallel_backend.wire.rank_settings import StartSettings
from testing import mini

pytestmark = pytest.mark.threads


@pytest.fixture(autouse=True)
def on_windows(monkeypatch, tmp_path):
    # A folder is in use there if a file in it cannot be removed, as one here always can: other tests' ranks lost theirs.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(signal, "SIGUSR1")
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.delattr(os, "register_at_fork")
    monkeypatch.setattr(ctypes, "CDLL", None)  # CDLL(None) is an error there
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)


def test_memory_is_asked_of_the_system(monkeypatch):
    free, total = host_memory()
    assert 0 < free < total == psutil.virtual_memory().total
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=1 << 30)))
    assert DeviceCopies(torch.device("cpu")).peak_bytes == 1 << 30


def test_a_rank_that_hangs_is_not_asked_for_its_stack(monkeypatch):
    monkeypatch.setattr(os, "kill", None)
    ranks = LocalRanks.__new__(LocalRanks)
    ranks._processes = [SimpleNamespace(pid=1)]
    ranks.dump(0)


def test_a_rank_ends_with_its_parent(monkeypatch, tmp_path):
    ended, (sentinel, alive) = threading.Event(), os.pipe()
    parent = SimpleNamespace(pid=os.getppid(), sentinel=sentinel)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    monkeypatch.setattr(parent_watch.os, "_exit", lambda _code: ended.set())
    directory = tmp_path / "ranks"
    directory.mkdir()
    parent_watch.end_with_parent(directory)
    assert not ended.wait(0.05)
    os.close(alive)
    assert ended.wait(10)
    assert not directory.exists()
    os.close(sentinel)


def test_ranks_are_joined_by_gloo():
    assert backend_for(("cuda:0", "cuda:1")) == "gloo"


def test_a_torch_that_ranks_cannot_use_is_named_before_any_starts(monkeypatch):
    """As AMD's wheels for Windows were."""
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"built without torch\.distributed.*newer torch.*WSL2"):
        LocalRanks(StartSettings(("cuda:0",), 1, timedelta(minutes=1)))


ROOT = Path(__file__).resolve().parents[2]
POSIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "pty"}
POSIX_NAMES = re.compile(r"\b(os\.(fork|getuid|geteuid|setsid|killpg|mkfifo)|signal\.(SIGKILL|SIGUSR\d|SIGCONT|SIGSTOP))\b")
BEHIND_A_BRANCH = {"compiled_code.py", "local.py", "log.py", "parent_watch.py", "sharing.py"}
"""Files whose use of such names the tests above run without them."""


def test_no_module_needs_what_windows_lacks_to_be_imported():
    needing, naming = set(), set()
    for path in (*ROOT.glob("parallel_backend/**/*.py"), *ROOT.glob("nodes/**/*.py")):
        text = path.read_text(encoding="utf-8")
        top = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        needing |= {
            (path.name, name) for name in names | {getattr(node, "module", None) for node in top} if name in POSIX_MODULES
        }
        naming |= {path.name} if POSIX_NAMES.search(text) else set()
    assert not needing
    assert naming == BEHIND_A_BRANCH


def test_a_model_runs_on_two_ranks(remote, mini_model, monkeypatch):
    """Loading, a run with its report, and unloading."""
    monkeypatch.setattr(DeviceCopies, "peak_bytes", 1 << 30)
    given = mini.inputs()
    model = remote(Degrees(pipe=2), fresh=True)
    assert mini.relative(model.predict(ModelCall(*given), lambda: None), mini.reference(mini_model, *given)) < 1e-5
    assert {stats.peak_bytes for stats in model.close_run(model.open_run(), lambda: None)} == {1 << 30}
    remote(Degrees(tensor=2), fresh=True)
