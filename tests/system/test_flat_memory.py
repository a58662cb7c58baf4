"""Many short runs of changing size leave nothing behind, neither in the ranks nor in the client, and nothing on disk."""

import gc
import os
import random
import re
import signal
import tempfile
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.lora import Delta
from parallel_backend.client.pipefusion.banded_run import BandedRun
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.processes import local as launch
from parallel_backend.processes.pool import Pool, RankError
from parallel_backend.wire import messages as m
from testing import mini
from testing.host_memory import held_bytes
from testing.models import on_ranks, whole_call
from tests.support import failing_rank
from tests.support.one_rank import OneRank

LIMIT = 0.02
"""Growth of a process's own memory by what its runs keep, see `growth`."""
SETTLED, RUNS = 70, 160
"""Runs after which memory is first looked at: every size has come, and every cache is full; and all of them."""
LEAKED_BLOCKS = 400
"""Blocks of Python's memory more in the client that are taken for noise. The watchdog keeps the numbers of 256 micro-steps,
of which Python has those up to 256 ready-made."""


def nobody() -> None:
    pass


class Cancelled(BaseException):
    pass


def cancelling(after: int) -> Callable[[], None]:
    polls = iter(range(after))

    def poll() -> None:
        if next(polls, None) is None:
            raise Cancelled

    return poll


def one_run(model: RemoteTransformer, chance: random.Random) -> None:
    """A prompt of random size, length, batch and kind; sometimes cancelled, sometimes with a LoRA."""
    size = {"height": 2 * chance.randint(4, 14), "width": 2 * chance.randint(4, 12), "batch": chance.randint(1, 2)}
    x, timestep, tensors = mini.inputs(text=chance.randint(1, 40), seed=chance.randint(0, 10**6), **size)
    model.begin_timeline()
    if chance.random() < 0.2:
        up = torch.randn(128, 2) * chance.random()
        model.adapt(chance.random(), [Delta("img_in.weight", up, torch.randn(2, 64), 1.0)], nobody)
    kind, steps = chance.choice(("calls", "bands", "bands", "cancelled", "refused")), chance.randint(2, 4)
    prompt = Prompt(tensors, {}, 1.0)
    if kind == "calls":
        for _ in range(2):
            model.predict(ModelCall(x, timestep, tensors), nobody)
    elif kind == "bands":
        sample_in_bands(model, x, linear_sigmas(steps), prompt, chance.randint(1, 4), 1)
    elif kind == "cancelled":
        with suppress(Cancelled):
            sample_in_bands(model, x, linear_sigmas(50), prompt, 2, 1, cancelling(chance.randint(0, 3)))
    else:
        x[0, 0, 0, 0] = float("nan")
        with pytest.raises(ValueError, match="latent_image"):
            model.predict(ModelCall(x, timestep, tensors), nobody)
    if chance.random() < 0.3:
        model.timeline(nobody)


class Books:
    """What the client has, and each rank: blocks of Python's memory, tensors, threads and open files; bytes."""

    def __init__(self, pids: tuple[int, ...]):
        gc.collect()
        self.ranks = {pid: held_bytes((pid,)) for pid in pids}
        self.blocks = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*parallel_backend*")])
        self.tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        self.threads = threading.active_count()
        self.files = [psutil.Process(pid).num_fds() for pid in (os.getpid(), *pids)]

    def more_blocks(self, before: "Books") -> int:
        return sum(line.count_diff for line in self.blocks.compare_to(before.blocks, "lineno"))


def growth(before: Books, middle: dict[int, int], after: Books) -> list[float]:
    """By rank: twice what it grew in the half of the runs in which it grew less. A leak grows in both. The allocator may
    take 10 MB more in one, if a busy machine has more messages wait than ever before."""
    halves = ((middle[pid] - first, after.ranks[pid] - middle[pid]) for pid, first in before.ranks.items())
    return [2 * min(pair) / first for pair, first in zip(halves, before.ranks.values(), strict=True)]


def run_many(pool: Pool, path: Path, degrees: Degrees, runs: int, settled: int) -> tuple[Books, Books, list[float]]:
    """What there is once caches are full, and after all runs; and `growth`."""
    model = on_ranks(pool, mini.opened(path), degrees, "fp32", "sdpa", nobody)
    chance = random.Random(7)
    tracemalloc.start()
    try:
        for number in range(runs):
            if number == settled:
                before = Books(pool.pids)
            if number == (settled + runs) // 2:
                middle = {pid: held_bytes((pid,)) for pid in pool.pids}
            one_run(model, chance)
        model.predict(ModelCall(*mini.inputs()), nobody)  # what was cancelled is over
        after = Books(pool.pids)
        return before, after, growth(before, middle, after)
    finally:
        tracemalloc.stop()


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.usefixtures("spawned")
@pytest.mark.parametrize("degrees", [Degrees(pipe=2), Degrees(ulysses=2)], ids=str)
def test_memory_is_flat(mini_file, measured, degrees):
    with closing(Pool(("cpu", "cpu"))) as pool:
        before, after, grown = run_many(pool, mini_file, degrees, RUNS, SETTLED)
    for of_rank in grown:
        measured(f"growth of a rank's memory in {RUNS - SETTLED} runs", of_rank)
    measured("more blocks of Python's memory in the client", after.more_blocks(before))
    assert max(grown) < LIMIT
    assert after.more_blocks(before) < LEAKED_BLOCKS
    assert after.tensors <= before.tensors + 20
    assert after.threads == before.threads
    assert after.files == before.files


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.usefixtures("spawned")
def test_a_leak_would_be_seen(mini_file, monkeypatch):
    """The control: a rank that keeps 1 MB of every run, and a client that keeps its calls."""
    monkeypatch.setattr(launch, "rank_entry", lambda: failing_rank.leaking)
    kept, post = [], RemoteTransformer.post
    monkeypatch.setattr(RemoteTransformer, "post", lambda self, call: (kept.append(call), post(self, call))[1])
    with closing(Pool(("cpu", "cpu"))) as pool:
        before, after, grown = run_many(pool, mini_file, Degrees(pipe=2), 160, SETTLED)
    assert min(grown) > LIMIT
    assert after.more_blocks(before) > LEAKED_BLOCKS
    assert after.tensors > before.tensors + 20


def test_what_belongs_to_a_dropped_conditioning_goes_with_it(remote):
    """In the ranks: they report their memory by what they hold, so this looks at the engine in this process."""
    rank = OneRank(remote(Degrees()).checkpoint.path)
    x, timestep, tensors = mini.inputs()
    for number in (1, 2):
        rank.put(x, tensors, number)
    size = len(rank.token_order.span)
    rank.engine.open_run(m.OpenRun(1, True))
    rank.step(x, timestep, 1, conditioning=1)
    rank.step(x, timestep, 1, conditioning=2)
    for number in (1, 2):
        for start, stop in ((0, size // 2), (size // 2, size)):
            rank.step(x, timestep * 0.5, 1, Span(start, stop), start == 0, conditioning=number)
    assert {key[0] for key in rank.engine.runs.buffers} == {1} and {key[1] for key in rank.engine.runs.buffers} == {1, 2}
    rank.engine.drop_conditioning(1)
    assert {key[0] for outputs in rank.stage.module_cache._kept.values() for key in outputs} <= {2}
    assert {key[1] for key in rank.engine.runs.buffers} == {2}


def test_thirty_cancels_leave_nothing(remote, mini_model):
    """No thread, no open file, and the same output as before."""
    model, given = remote(Degrees(pipe=2), fresh=True), mini.inputs()
    x, _, tensors = given
    prompt = Prompt(tensors, tensors, 1.0)

    def state() -> tuple[list[int], list[int], list[str]]:
        model.predict(ModelCall(*given), nobody)  # what was cancelled is over
        gc.collect()
        processes = [psutil.Process(), *map(psutil.Process, model.pool.pids)]
        names = sorted(thread.name for thread in threading.enumerate())
        return [each.num_fds() for each in processes], [each.num_threads() for each in processes[1:]], names

    def cancelled(number: int) -> None:
        with pytest.raises(Cancelled):
            sample_in_bands(model, x, linear_sigmas(50), prompt, 2, 1, cancelling(number % 5))

    cancelled(0)  # the first one makes what stays
    before = state()
    for number in range(30):
        cancelled(number)
    assert state() == before
    assert mini.relative(model.predict(ModelCall(*given), nobody), mini.reference(mini_model, *given)) <= 1e-5
    assert model.pool.error is None


def test_a_run_that_was_cancelled_while_ranks_are_asked_is_closed(remote, monkeypatch):
    model = remote(Degrees(pipe=2))
    told, tell = [], model.pool.tell
    monkeypatch.setattr(model.pool, "tell", lambda message, *rest: (told.append(message), tell(message, *rest)))

    def cancel() -> None:
        raise Cancelled

    def busy() -> None:
        x, timestep, tensors = mini.inputs(height=64, width=64)
        model.post(whole_call(model, x, timestep, tensors))

    busy()
    with pytest.raises(Cancelled):
        BandedRun(model, (Span(0, 16),), (2, 16, 16, 12), True, poll=cancel)
    opened, closed = (
        [message.run for message in told if type(message).__name__ == name] for name in ("OpenRun", "CloseRun")
    )
    assert opened == closed != []
    assert not model._memory._runs


# What is left on disk and in shared memory.


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """For all temporary files of this process and its ranks: other pools of the machine have theirs elsewhere."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def shared_memory(pids: tuple[int, ...]) -> set[Path]:
    """Segments that bear the number of one of these processes, as torch's do."""
    folder = Path("/dev/shm")
    numbers = {str(pid) for pid in pids}
    return {path for path in folder.glob("*") if numbers & set(re.split(r"\D+", path.name))}


@pytest.mark.processes
@pytest.mark.usefixtures("spawned")
@pytest.mark.parametrize(
    ("degrees", "killed"),
    [
        (Degrees(ulysses=2), False),
        (Degrees(pipe=2), True),
        pytest.param(Degrees(pipe=2), False, marks=pytest.mark.full),
        pytest.param(Degrees(ulysses=2), True, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_nothing_is_left_after_a_pool_was_closed_or_lost_a_rank(mini_file, own_folder, degrees, killed):
    pool = Pool(("cpu", "cpu"))
    pids = pool.pids
    model = on_ranks(pool, mini.opened(mini_file), degrees, "fp32", "sdpa", nobody)
    given = mini.inputs()
    model.predict(ModelCall(*given), nobody)
    assert [path.name[:13] for path in own_folder.iterdir()] == ["parallel-dit-"]  # the control: there is something
    if killed:
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match="killed by signal 9"):
            while True:
                model.predict(ModelCall(*given), nobody)
    pool.close()
    assert list(own_folder.iterdir()) == []
    assert shared_memory((os.getpid(), *pids)) == set()
