"""What happens when a rank, a request or ComfyUI itself ends at the wrong moment."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import psutil
import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool, RankError, wait_for
from parallel_backend.wire.messages import BadMessage
from testing import mini
from testing.models import on_ranks

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 5.0
"""Seconds within which an error, or the end of a process, is promised."""


class Cancelled(BaseException):
    """As ComfyUI's InterruptProcessingException, no Exception in recent versions."""


@pytest.fixture(scope="module")
def given():
    return mini.inputs()


@pytest.fixture(scope="module")
def expected(mini_model, given):
    return mini.reference(mini_model, *given)


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


class Loss:
    """A rank is lost in the middle of calls: `check` that the error names it, all end, and the next pool works."""

    def __init__(self, load, given, expected, measured):
        self.load, self.given, self.expected, self.measured = load, given, expected, measured
        self.model = load(Degrees(pipe=2))

    def check(self, what: str, lose, words: str, mend=lambda: None) -> None:
        pids, loss = self.model.pool.pids, After(lose)
        with pytest.raises(RankError, match=words):
            many_steps(self.model, self.given, loss)
        seconds = time.monotonic() - loss.at
        self.measured(f"seconds from {what} to error", seconds)
        assert seconds < LIMIT
        assert wait_until_gone(pids)
        with pytest.raises(RankError, match=words):  # the model object stays unusable, and says why
            self.model.predict(ModelCall(*self.given), lambda: None)
        mend()
        following = self.load(Degrees(pipe=2))
        assert following.pool is not self.model.pool
        assert mini.relative(following.predict(ModelCall(*self.given), lambda: None), self.expected) <= 1e-5


@pytest.mark.alone
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_the_next_pool_works(remote, given, expected, victim, measured):
    loss = Loss(remote, given, expected, measured)
    kill = lambda: os.kill(loss.model.pool.pids[victim], signal.SIGKILL)  # noqa: E731
    loss.check("kill", kill, rf"rank {victim} \(cpu\) was killed by signal 9")


def test_a_rank_killed_during_a_call_is_named(pools, remote, given):
    """The other rank of a Ulysses pair fails in its all-to-all: still the killed one is named, not the one that noticed."""
    model = remote(Degrees(ulysses=2))
    stop = threading.Event()

    def kill():
        stop.wait(0.3)
        os.kill(model.pool.pids[1], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(RankError, match=r"rank 1 \(cpu\) was killed by signal 9"):
        while True:
            model.predict(ModelCall(*given), lambda: None)


def test_an_error_inside_the_model_comes_back_with_rank_and_traceback(remote, given):
    x, timestep, tensors = given
    model = remote(Degrees(pipe=2))
    narrow = tensors | {"context": tensors["context"][..., :5]}
    with pytest.raises(RankError, match=r"rank \d \(cpu\) failed in micro-step \d+: RuntimeError") as error:
        model.predict(ModelCall(x, timestep, narrow), lambda: None)
    assert "Traceback (most recent call last):" in str(error.value)
    assert "mini_flux.py" in str(error.value)
    assert wait_until_gone(model.pool.pids)


def test_a_file_that_vanished_fails_in_loading(pools, mini_model, given, tmp_path):
    path = mini.save(mini_model, tmp_path / "gone.safetensors")
    checkpoint = mini.opened(path)

    def vanish(doing: str, fraction: float) -> None:
        path.unlink(missing_ok=True)  # after the client's own look at it

    with pytest.raises(RankError, match=r"rank \d \(cpu\) failed in loading: ValueError: model_name: gone.safetensors"):
        on_ranks(pools(2), checkpoint, Degrees(pipe=2), "fp32", "sdpa", lambda: None, progress=vanish)
    with pytest.raises(ValueError, match=r"model_name: gone\.safetensors"):
        on_ranks(pools(2), checkpoint, Degrees(pipe=2), "fp32", "sdpa", lambda: None)


def cancel():
    raise Cancelled


@pytest.mark.alone
@pytest.mark.parametrize("degrees", [Degrees(pipe=2), Degrees(ulysses=2)], ids=str)
def test_cancel_in_a_call_leaves_ranks_that_work(remote, given, expected, degrees):
    model = remote(degrees)
    x, timestep, tensors = given
    large = mini.inputs(batch=6, height=64, width=64, text=100)
    poll = After(cancel, 0.0)
    with pytest.raises(Cancelled):
        model.predict(ModelCall(*large), poll)
    assert time.monotonic() - poll.at < LIMIT
    assert mini.relative(model.predict(ModelCall(x, timestep, tensors), lambda: None), expected) <= 1e-5
    assert model.pool.error is None


@pytest.mark.alone
@pytest.mark.parametrize("degrees", [Degrees(pipe=2), Degrees(pipe=2, ulysses=2)], ids=str)
def test_cancel_in_a_run_leaves_ranks_that_work(remote, given, expected, degrees):
    model = remote(degrees)
    for _ in range(2):
        poll = After(cancel, 0.3)
        with pytest.raises(Cancelled):
            many_steps(model, given, poll)
        assert time.monotonic() - poll.at < LIMIT
        assert mini.relative(model.predict(ModelCall(*given), lambda: None), expected) <= 1e-5
    x, _, tensors = given
    after = sample_in_bands(model, x, linear_sigmas(3), Prompt(tensors, tensors, 1.0), 3, 1)[0]
    fresh = sample_in_bands(remote(degrees, fresh=True), x, linear_sigmas(3), Prompt(tensors, tensors, 1.0), 3, 1)[0]
    assert torch.equal(after, fresh)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("band ")]


@pytest.mark.alone
@pytest.mark.parametrize("model", ["loaded", pytest.param("none", marks=pytest.mark.full)])
def test_no_rank_outlives_a_killed_parent(mini_file, model, tmp_path):
    """With a run under way and without: the ranks notice that the control connection ended."""
    script = tmp_path / "comfyui_main.py"
    script.write_text(
        "import sys, threading\n"
        "if __name__ == '__main__':\n"
        "    from parallel_backend.processes.pool import Pool\n"
        "    pool = Pool(('cpu', 'cpu'))\n"
        "    pool.ready.result()\n"
        f"    if {model == 'loaded'}:\n"
        "        from testing.models import on_ranks\n"
        "        from parallel_backend.core.degrees import Degrees\n"
        "        from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands\n"
        "        from testing import mini\n"
        f"        from pathlib import Path; checkpoint = mini.opened(Path({str(mini_file)!r}))\n"
        "        model = on_ranks(pool, checkpoint, Degrees(pipe=2), 'fp32', 'sdpa', lambda: None)\n"
        "        x, _, tensors = mini.inputs()\n"
        "        arguments = (model, x, linear_sigmas(5000), Prompt(tensors, tensors, 1.0), 3, 1)\n"
        "        threading.Thread(target=sample_in_bands, args=arguments, daemon=True).start()\n"
        "    print(*pool.pids, pool.ranks.directory, flush=True)\n"
        "    threading.Event().wait()\n"
        "else:\n"
        "    print('imported again', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    try:
        *pids, directory = process.stdout.readline().decode().split()
        pids = [int(pid) for pid in pids]
        assert all(psutil.pid_exists(pid) for pid in pids)
        time.sleep(0.3)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert wait_until_gone(pids)
    assert not Path(directory).exists()  # a killed process cannot remove it itself: the ranks do


def descendants() -> set[int]:
    """Children of this process that are ranks: multiprocessing's own helpers stay."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if "multiprocessing.spawn" in " ".join(child.cmdline())}


@pytest.mark.processes
@pytest.mark.usefixtures("spawned")
def test_close_leaves_no_process_and_no_file():
    before, folder = descendants(), Path(tempfile.gettempdir())
    pool = Pool(("cpu", "cpu"))
    created = set(folder.glob("parallel-dit-*"))
    pool.ready.result(timeout=120)
    pids = set(pool.pids)
    assert descendants() == before | pids
    assert pool.ranks.directory in created
    assert pool.ranks.directory.stat().st_mode & 0o077 == 0  # whoever could write the store could join the group
    pool.close()
    pool.close()
    assert descendants() == before
    assert wait_until_gone(pids, 0.1)
    assert not pool.ranks.directory.exists()


def listening(pid: int) -> set[str]:
    return {c.laddr.ip for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN}


def test_ranks_listen_on_loopback_only(remote):
    model = remote(Degrees(ulysses=2))
    addresses = set().union(*(listening(pid) for pid in model.pool.pids))
    assert addresses  # the control: Gloo does listen, so there is something to see
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


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


def test_an_unknown_message_ends_the_rank_with_its_name(pools):
    """A message type that is not for a rank, sent over the pool's own channel."""
    from parallel_backend.wire import messages as m

    pool = pools(1)
    pool.send(0, m.Loaded(0, 1, ()))
    deadline = time.monotonic() + LIMIT
    while pool.error is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert isinstance(pool.error, RankError)
    assert BadMessage.__name__ in str(pool.error)


def test_a_picture_of_fewer_tokens_than_ranks_is_refused(remote, mini_model):
    model = remote(Degrees(ulysses=2))
    with pytest.raises(ValueError, match="ulysses_degree 2 cuts this picture"):
        model.predict(ModelCall(*mini.inputs(batch=1, height=2, width=2, text=1)), lambda: None)
    given = mini.inputs(batch=1, height=2, width=4, text=1)
    assert mini.relative(model.predict(ModelCall(*given), lambda: None), mini.reference(mini_model, *given)) <= 1e-5


class _Late(Future):
    """Gets its result between the waiter's time-out and its look at `done`."""

    def __init__(self, outcome):
        super().__init__()
        self.outcome = outcome

    def result(self, timeout=None):
        try:
            return super().result(timeout if self.done() else 0)
        except FutureTimeout:
            if not self.done():
                if isinstance(self.outcome, Exception):
                    self.set_exception(self.outcome)
                else:
                    self.set_result(self.outcome)
            raise


def test_a_result_that_comes_as_the_wait_for_it_times_out_is_a_result():
    assert wait_for(_Late("there"), lambda: None) == "there"
    with pytest.raises(FutureTimeout, match="its own"):
        wait_for(_Late(FutureTimeout("its own")), lambda: None)
