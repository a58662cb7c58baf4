"""Processes that are forked from ComfyUI's, such as another node pack's workers: ranks neither outlive nor die of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

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
    pool = registry().pools.use(("cpu", "cpu"), lambda pool: pool)
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
