"""What happens when a rank, a request or ComfyUI itself ends at the wrong moment."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from parallel_backend.client.call import ModelCall
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool, RankError
from testing import mini
from testing.models import on_ranks

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 5.0
"""Seconds within which an error, or the end of a process, is promised."""


def many_steps(model, given, poll=lambda: None):
    """A run that lasts until something ends it."""
    x, _, tensors = given
    return sample_in_bands(model, x, linear_sigmas(5000), Prompt(tensors, tensors, 1.0), 3, 1, poll)


def wait_until_gone(pids, seconds=LIMIT) -> bool:
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


class After:
    """A poll that acts once when it has been called for a while, and knows when it did."""

    def __init__(self, action, seconds: float = 0.5):
        self.action, self.at, self.start = action, None, time.monotonic() + seconds

    def __call__(self) -> None:
        if self.at is None and time.monotonic() > self.start:
            self.at = time.monotonic()
            self.action()


def lose_a_rank(load, given, expected, words: str) -> None:
    """Rank 1 is killed in the middle of a run: the error names it, all end, and the next pool works."""
    model = load(Degrees(pipe=2))
    pids, loss = model.pool.whole.ranks.pids, After(lambda: os.kill(model.pool.whole.ranks.pids[1], signal.SIGKILL))
    with pytest.raises(RankError, match=words):
        many_steps(model, given, loss)
    assert time.monotonic() - loss.at < LIMIT
    assert wait_until_gone(pids)
    with pytest.raises(RankError, match=words):  # the model object stays unusable, and says why
        model.predict(ModelCall(*given), lambda: None)
    following = load(Degrees(pipe=2))
    assert following.pool is not model.pool
    assert mini.relative(following.predict(ModelCall(*given), lambda: None), expected) <= 1e-5


@pytest.mark.alone
def test_a_killed_rank_is_named_and_the_next_pool_works(remote, given, expected):
    lose_a_rank(remote, given, expected, r"rank 1 \(cpu\) was killed by signal 9")


def test_an_error_inside_the_model_comes_back_with_rank_and_traceback(remote, given):
    x, timestep, tensors = given
    model = remote(Degrees(pipe=2))
    narrow = tensors | {"context": tensors["context"][..., :5]}
    with pytest.raises(RankError, match=r"rank \d \(cpu\) failed in micro-step \d+: RuntimeError") as error:
        model.predict(ModelCall(x, timestep, narrow), lambda: None)
    assert "Traceback (most recent call last):" in str(error.value)
    assert "mini_flux.py" in str(error.value)
    assert wait_until_gone(model.pool.whole.ranks.pids)


def test_a_file_that_vanished_fails_in_loading(pools, mini_model, given, tmp_path):
    path = mini.save(mini_model, tmp_path / "gone.safetensors")
    checkpoint = mini.opened(path)

    def vanish(doing: str, fraction: float) -> None:
        path.unlink(missing_ok=True)  # after the client's own look at it

    with pytest.raises(RankError, match=r"rank \d \(cpu\) failed in loading: ValueError: model_name: gone.safetensors"):
        on_ranks(pools(2), checkpoint, Degrees(pipe=2), "fp32", "sdpa", lambda: None, progress=vanish)
    with pytest.raises(RankError, match=r"model_name: gone\.safetensors does not exist"):
        on_ranks(pools(2), checkpoint, Degrees(pipe=2), "fp32", "sdpa", lambda: None)


@pytest.mark.processes
@pytest.mark.usefixtures("spawned")
def test_close_leaves_no_process_and_no_file():
    folder = Path(tempfile.gettempdir())
    pool = Pool(("cpu", "cpu"))
    created = set(folder.glob("parallel-dit-*"))
    pool.ready.result(timeout=120)
    pids = set(pool.whole.ranks.pids)
    assert pool.ranks.directory in created
    assert pool.ranks.directory.stat().st_mode & 0o077 == 0  # whoever could write the store could join the group
    pool.close()
    pool.close()
    assert wait_until_gone(pids, 0.1)
    assert not pool.ranks.directory.exists()


@pytest.mark.processes
def test_a_spawned_rank_does_not_run_the_parents_main_again(tmp_path):
    """ComfyUI's main.py has no guard against being imported: a rank that did so would start another server."""
    trace = tmp_path / "trace"
    script = tmp_path / "main.py"
    script.write_text(
        "from pathlib import Path\n"
        f"trace = Path({str(trace)!r})\n"
        "trace.write_text(trace.read_text() + 'run ' if trace.exists() else 'run ')\n"
        "from parallel_backend.processes.pool import Pool\n"
        "pool = Pool(('cpu',))\n"
        "pool.ready.result(timeout=120)\n"
        "pool.close()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, check=True, timeout=120)
    assert trace.read_text() == "run "
