"""Processes that are forked from ComfyUI's, such as another node pack's workers: ranks neither outlive nor die of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from parallel_backend.processes.local import LocalRanks
from parallel_backend.wire.rank_settings import StartSettings
from tests.support.idle_rank import idle

pytestmark = pytest.mark.processes
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 5.0
"""Seconds within which the end of a process is promised."""
COMFYUI = """
import ctypes, functools, os, sys, threading, time
if __name__ == "__main__":
    from parallel_backend.client.registry import registry
    from parallel_backend.processes.local import LocalRanks
    from tests.support.idle_rank import idle

    registry().start_of = lambda devices: functools.partial(LocalRanks, entry=idle)
    pool = registry()._pools.use(("cpu", "cpu"), lambda pool: pool)
    logs = [pool.ranks.directory / f"rank-{rank}.log" for rank in range(2)]
    while not all(path.exists() and path.read_text() for path in logs):
        time.sleep(0.01)
"""
"""A program with two ranks that have started. What follows is indented by four blanks."""


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def until(condition) -> bool:
    deadline = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@contextlib.contextmanager
def comfyui(folder: Path, then: str) -> Iterator[subprocess.Popen]:
    """A process that runs COMFYUI and then the lines `then`, with temporary files in `folder`."""
    script = folder / "comfyui_main.py"
    script.write_text(COMFYUI + "".join(f"    {line}\n" for line in then.splitlines()))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ranks_of(pid: int) -> list[int]:
    children = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in children if "multiprocessing.spawn" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("fork", "lets_go"), [("os.fork()", True), ("ctypes.PyDLL(None).fork()", False)], ids=["Python's", "another library's"]
)
def test_no_rank_outlives_a_killed_parent_whose_fork_lives(tmp_path, fork, lets_go):
    """A fork has the ends of the connections and of the pipes by which children are told of their parent's end; one that no
    Python function is told of keeps them."""
    then = (
        f"child = {fork}\n"
        "if child == 0:\n"
        "    time.sleep(600)\n"
        "print(child, pool.ranks.directory, flush=True)\n"
        "time.sleep(600)"
    )
    with comfyui(tmp_path, then) as process:
        child, directory = process.stdout.readline().split()
        ranks = [pid for pid in ranks_of(process.pid) if pid != int(child)]
        try:
            assert len(ranks) == 2
            process.kill()
            process.wait()
            assert until(lambda: all(map(gone, ranks)))
            assert not gone(int(child))  # the control: it could have kept them
            assert until(lambda: not Path(directory).exists())
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_ranks_outlive_the_end_of_a_fork(tmp_path):
    """Its inherited functions at exit, multiprocessing's and the registry's, would end its parent's ranks."""
    then = (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(0)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "time.sleep(0.3)\n"
        "ends = [pool.ranks.how_ended(rank) for rank in range(2)]\n"
        "print(status, ends, pool.ranks.directory.exists(), flush=True)\n"
        "os._exit(0)"
    )
    with comfyui(tmp_path, then) as process:
        said, errors = process.communicate(timeout=60)
    assert said.strip() == "0 [None, None] True"
    assert "Traceback" not in errors


def test_a_fork_asks_ranks_of_its_own_to_end(tmp_path):
    """multiprocessing's function at exit would kill them while the threads that watch them run."""
    then = (
        "sys.stdout.flush()\n"
        "if os.fork() == 0:\n"
        "    own = registry()._pools.use(('cuda:0',), lambda pool: pool)\n"
        "    log = own.ranks.directory / 'rank-0.log'\n"
        "    while not (log.exists() and log.read_text()):\n"
        "        time.sleep(0.01)\n"
        "    registry().exit()\n"
        "    print(own.error, own.watchdog.turns > 0, own._receiver.is_alive(), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "os._exit(0)"
    )
    with comfyui(tmp_path, then) as process:
        said, errors = process.communicate(timeout=60)
    assert said.strip() == "Parallel DiT: the ranks were ended True False"
    assert "Traceback" not in errors


@pytest.mark.usefixtures("spawned")
def test_a_fork_has_no_end_of_a_ranks_connection(tmp_path):
    start = StartSettings(("cpu",), 1, timedelta(minutes=1), tmp_path)
    ranks = LocalRanks(start, idle)
    try:
        child = os.fork()
        if child == 0:
            held = not ranks.channels[0].connection.closed or ranks._claim._handle or ranks._log_folder._claim._handle
            os._exit(1 if held else 0)
        assert os.waitpid(child, 0)[1] == 0
        assert not ranks.channels[0].connection.closed
    finally:
        ranks.kill()


def test_a_load_does_not_hold_up_the_end_of_comfyui(tmp_path):
    """Ctrl-C while ranks start or load, which these go on doing for ever."""
    then = (
        "def load():\n"
        "    registry().pool_for(('cpu', 'cpu'), lambda: waiting.set())\n"
        "waiting = threading.Event()\n"
        "threading.Thread(target=load, daemon=True).start()\n"
        "waiting.wait()\n"
        "print(*pool.pids, pool.ranks.directory, flush=True)\n"
        "raise KeyboardInterrupt"
    )
    with comfyui(tmp_path, then) as process:
        said, _ = process.communicate(timeout=60)
    *pids, directory = said.split()
    assert len(pids) == 2
    assert all(gone(int(pid)) for pid in pids)
    assert not Path(directory).exists()
