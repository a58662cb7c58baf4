"""Ranks that are stopped, that hang, that are slow: who is blamed, when, with what words, and that all else goes on.

The judge by itself, with a clock of the test's own; the pool over pipes without processes; and real ranks.
"""

import contextlib
import errno
import functools
import itertools
import multiprocessing
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Span
from parallel_backend.processes import local as launch
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import Pool, RankError
from parallel_backend.processes.watchdog import Verdict, Watchdog
from parallel_backend.quickstart.model import mini_flux
from parallel_backend.wire import messages as m
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.tcp import shutdown
from testing import acting_rank, mini
from testing.fork_server import started_by
from testing.models import nobody, on_ranks
from tests.processes.test_failures import wait_until_gone

SETUP = Setup(Path(), "fp32", ("cpu", "cpu"), Degrees(pipe=2), "auto", own_class=mini_flux())
NEVER = 1e9
"""Seconds, for limits that a test must not come to."""


# The judge.


class Played:
    """A Watchdog of two ranks, and what they would send. One call of `second` is a second."""

    def __init__(self, ready: bool = True):
        self.dog = Watchdog(2, silence=20.0)
        self.progress = [0, 0]
        if ready:
            for rank in range(2):
                self.beat(rank)
                self.dog.heard(rank, m.Ready(rank))
            self.second()
            for rank in range(2):
                self.beat(rank)

    def beat(self, rank: int, doing: str = m.IDLE, done: int = 0, waiting: bool = False, unanswered: float = 0.0) -> None:
        self.progress[rank] += done
        self.dog.heard(rank, m.HeartbeatMessage(rank, doing, self.progress[rank], waiting, unanswered=unanswered))

    def second(self, awaited=(), blocked=(False, False), turned: bool = True) -> Verdict | None:
        self.dog.turns += turned
        return self.dog.tick(1.0, awaited, blocked)

    def until(self, limit: int = 5000, heard=lambda: None, **named) -> tuple[int, Verdict | None]:
        """The second in which a verdict comes, and the verdict; the limit and None if none does."""
        for count in range(1, limit + 1):
            heard()
            if (verdict := self.second(**named)) is not None:
                return count, verdict
        return limit, None


def step(seq: int, tokens: int = 100, conditioning: int = 1) -> m.Step:
    span = Span(0, tokens)
    return m.Step(seq, 0, conditioning, span, True, False, True, Span(0, 1), torch.ones(1), (), (), None)


def working(played: Played, seq: int, waiting: tuple[bool, bool] = (False, False), deaf: int | None = None):
    """Both ranks answer, in a micro-step, and come no further. `deaf`: the rank whose driver does not answer from now on."""
    seconds = itertools.count()

    def beats() -> None:
        since = next(seconds)
        for rank in range(2):
            doing = m.IDLE if seq == 0 else f"micro-step {seq}"
            played.beat(rank, doing, waiting=waiting[rank], unanswered=since * (rank == deaf))

    return beats


def test_a_rank_that_is_not_heard_is_named_after_the_silence():
    played = Played()
    played.beat(1, "micro-step 12")
    count, verdict = played.until(heard=lambda: played.beat(0))
    assert (count, verdict.ranks, verdict.hung) == (20, (1,), False)
    assert verdict.text.startswith("sent no heartbeat for 20 s, last seen in micro-step 12. It was stopped")


def test_silence_before_the_first_beat_is_the_starts():
    played = Played(ready=False)
    played.beat(0, m.START_UP, waiting=True)
    count, verdict = played.until(heard=lambda: played.beat(0, m.START_UP, waiting=True))
    assert (count, verdict.ranks) == (301, (1,))  # the first second is the one in which rank 0 showed up
    assert verdict.text.startswith("did not start within 300 s.")


def test_while_the_client_is_stuck_only_who_blocks_it_is_silent():
    played = Played()
    played.second()
    assert played.until(turned=False)[1] is None
    count, verdict = played.until(turned=False, blocked=(False, True))
    assert (count, verdict.ranks) == (19, (1,))
    played = Played()
    played.second()
    played.dog.receiving = 0
    count, verdict = played.until(turned=False)
    assert (count, verdict.ranks) == (19, (0,))


def test_work_of_which_nothing_is_known_gets_long():
    played = Played()
    played.dog.sent(step(1))
    count, verdict = played.until(heard=working(played, 1, (False, True)))
    assert (count, verdict.ranks, verdict.hung) == (1800, (0,), True)
    assert verdict.text.startswith("made no progress for 1800 s, last seen in micro-step 1.")


def measured(played: Played, seconds: int, tokens: int = 100, conditioning: int = 1) -> None:
    """A micro-step was done whose longest block took this long."""
    played.dog.sent(step(1, tokens, conditioning))
    assert played.until(seconds, heard=working(played, 1))[1] is None
    played.beat(0, "micro-step 1", done=1)
    assert played.second() is None
    played.dog.heard(1, m.Output(1, 1, torch.ones(1)))
    played.second()


@pytest.mark.parametrize(("block", "limit"), [(1, 60), (30, 600)])
def test_a_micro_step_that_is_known_gets_many_times_its_longest_block(block, limit):
    played = Played()
    measured(played, block)
    played.dog.sent(step(2))
    count, verdict = played.until(heard=working(played, 2))
    assert abs(count - limit) <= 20  # of seconds, as a block's are counted from beat to beat
    assert verdict.ranks == (0, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda dog: dog.sent(step(2, tokens=101)),
        lambda dog: dog.sent(step(2, conditioning=2)),
        lambda dog: dog.sent(m.Load(SETUP, (), ())),
    ],
    ids=["larger", "other prompt", "other model"],
)
def test_what_is_new_is_not_held_to_what_was_measured(change):
    played = Played()
    measured(played, 1)
    change(played.dog)
    if 2 not in played.dog._steps:
        played.dog.sent(step(2))
    count, verdict = played.until(heard=working(played, 2))
    assert (count, verdict is not None) == (1800, True)


@pytest.mark.parametrize("others", [(), (2,)], ids=["alone", "beside another model"])
def test_a_micro_step_that_may_compile_gets_long_whatever_is_known_and_whoever_loads(others):
    played = Played()
    played.dog.sent(m.Load(replace(SETUP, compile=True), (), ()), 1)
    for number in others:
        played.dog.sent(m.Load(SETUP, (), ()), number)
    measured(played, 1)
    played.dog.sent(step(2))
    count, verdict = played.until(heard=working(played, 2))
    assert (count, verdict is not None) == (1800, True)


@pytest.mark.parametrize(
    ("seq", "waiting", "known", "limit", "blamed"),
    [
        (2, (False, True), True, 60, (0,)),
        (2, (False, True), False, 1800, (0,)),
        (2, (True, True), True, 60, (1,)),  # both waited for the other when their drivers answered last
        (0, (False, False), True, 65, (1,)),  # at rest, so it is counted once it is no question of a moment any more
    ],
    ids=["known", "first of its size", "both wait", "at rest"],
)
def test_a_driver_that_never_answers_is_judged_as_a_stall(seq, waiting, known, limit, blamed):
    played = Played()
    if known:
        measured(played, 1)
    if seq:
        played.dog.sent(step(seq))
    deaf = blamed[0]
    count, verdict = played.until(heard=working(played, seq, waiting, deaf))
    assert (verdict.ranks, verdict.hung) == (blamed, True)
    assert abs(count - limit) <= 2
    assert f" The GPU's driver has not answered rank {deaf} for {count - 1} s. Queue the prompt again" in verdict.text


def test_loading_gets_long_and_unloading_does_not():
    for reply, limit in ((m.Loaded, 1800), (m.Unloaded, 60)):
        played = Played()
        count, verdict = played.until(heard=working(played, 1), awaited=[reply])
        assert (count, verdict is not None) == (limit, True)


def test_ranks_that_all_wait_are_all_named_and_so_is_a_reply_that_never_comes():
    played = Played()
    _, verdict = played.until(heard=working(played, 3, (True, True)))
    assert verdict.ranks == (0, 1)
    assert verdict.text.startswith("waited for each other for ")
    played = Played()
    _, verdict = played.until(heard=lambda: [played.beat(rank) for rank in range(2)], awaited=[m.RunStats])
    assert verdict.text.startswith("left a request unanswered for 60 s")


@pytest.mark.parametrize("comes", [False, True])
def test_an_output_that_never_comes_is_missed_though_all_ranks_are_idle(comes):
    played = Played()
    played.dog.sent(step(1))
    if comes:
        played.dog.heard(1, m.Output(1, 1, torch.ones(1)))
    count, verdict = played.until(heard=lambda: [played.beat(rank) for rank in range(2)])
    assert (count, verdict and verdict.ranks) == ((5000, None) if comes else (1800, (0, 1)))


# The pool, over pipes without processes.


class PipeRanks:
    """In place of local.LocalRanks: the test has the ranks' ends of the channels, and says what they do."""

    def __init__(self, start: launch.StartSettings):
        pairs = [Pipe(duplex=True) for _ in start.devices]
        self.channels = [Channel(ours) for ours, _ in pairs]
        self.theirs = [Channel(theirs) for _, theirs in pairs]
        self.alive = [True] * len(pairs)
        self.dumped: list[int] = []
        self.names, self.logs, self.pids, self.ends = start.devices, None, (), {}
        for rank in range(len(pairs)):
            self.theirs[rank].send(m.HeartbeatMessage(rank, m.IDLE, 0, False))
            self.theirs[rank].send(m.Ready(rank))
            threading.Thread(target=self._beat, args=(rank, start.heartbeat_seconds), daemon=True).start()

    def _beat(self, rank: int, seconds: float) -> None:
        with contextlib.suppress(OSError):
            while self.alive[rank]:
                self.theirs[rank].send(m.HeartbeatMessage(rank, "micro-step 7", 0, rank == 0))
                time.sleep(seconds)

    def how_ended(self, rank: int) -> str | None:
        return None

    def log_tail(self, rank: int) -> str:
        return f"log of rank {rank}" + " with stacks" * (rank in self.dumped)

    def dump(self, rank: int) -> None:
        self.dumped.append(rank)

    def join(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.3))

    def kill(self) -> None:
        self.alive = [False] * len(self.alive)
        for channel in self.theirs:
            shutdown(channel.connection)


@pytest.fixture
def pipe_pool():
    """A Pool of two PipeRanks, and their ends."""
    before = set(threading.enumerate())  # other pools of the session have theirs
    pool = Pool(("cpu", "cpu"), start=PipeRanks, silence=1.0)
    pool.ready.result(timeout=10)
    yield pool, pool.ranks
    pool.close()
    new = set(threading.enumerate()) - before
    assert not [thread.name for thread in new if thread.name.startswith("parallel-dit")]


def error_of(future: Future) -> str:
    with pytest.raises(RankError) as error:
        future.result(timeout=30)
    return str(error.value)


def test_a_rank_that_ends_in_the_middle_of_a_message(pipe_pool):
    """Then the pool's own thread is blocked, and cannot hear the other rank either."""
    pool, ranks = pipe_pool
    future = pool.ask(m.Unload(), m.Unloaded)
    ranks.alive[0] = False
    with ranks.theirs[0]._sending:
        ranks.theirs[0].connection.send_bytes(m.encode(m.Output(0, 1, torch.ones(4)))[0])
        text = error_of(future)
    assert "rank 0 (cpu) sent no heartbeat" in text


def test_a_connection_that_ends_is_an_error_even_of_a_process_that_does_not(pipe_pool):
    pool, ranks = pipe_pool
    future = pool.ask(m.Unload(), m.Unloaded)
    ranks.alive[1] = False
    ranks.theirs[1].close()
    assert "rank 1 (cpu) closed its connection, last seen in micro-step 7." in error_of(future)


def test_a_request_that_reaches_some_ranks_alone_ends_the_pool_at_once(pipe_pool, monkeypatch):
    pool, ranks = pipe_pool
    failures, frame = [], type(ranks.channels[1].connection).send_bytes
    place = ModelRanks(pool)
    place.listen(lambda output: None, failures.append)

    def send_bytes(connection, content):
        if connection is ranks.channels[1].connection:
            raise KeyboardInterrupt
        frame(connection, content)

    monkeypatch.setattr(type(ranks.channels[1].connection), "send_bytes", send_bytes)
    with pytest.raises(KeyboardInterrupt):
        pool.ask(m.Unload(), m.Unloaded)
    assert str(pool.error).startswith("Parallel DiT: sending to the ranks was interrupted by KeyboardInterrupt")
    assert len(failures) == 1


def test_a_rank_that_takes_nothing_does_not_hold_the_pool(pipe_pool):
    """A sender holds the client's lock, the pool's thread waits for it, and the rank that blocks both is the one named."""
    pool, ranks = pipe_pool
    lock, errors = threading.Lock(), []

    def on_output(_output: m.Output) -> None:
        with lock:
            pass

    place = ModelRanks(pool)
    place.listen(on_output, errors.append)
    ranks.alive[1] = False
    future = pool.ask(m.Unload(), m.Unloaded)
    with lock:
        ranks.theirs[0].send(m.Output(0, 1, torch.ones(1)), model=place.number)
        pool.send(1, m.Output(0, 1, torch.ones(1 << 22)))  # 16 MB: more than a pipe takes
    assert "rank 1 (cpu) sent no heartbeat" in error_of(future)
    assert len(errors) == 1


@pytest.mark.parametrize("politely", [True, False])
def test_closing_ends_though_a_rank_takes_nothing_and_lets_go_who_waits(pipe_pool, politely):
    pool, ranks = pipe_pool
    pool.watchdog.silence = NEVER
    future = pool.ask(m.Unload(), m.Unloaded)
    sender = threading.Thread(target=pool.send, args=(1, m.Output(0, 1, torch.ones(1 << 22))))
    sender.start()
    while not ranks.channels[1].sending:
        time.sleep(0.01)
    pool.close(politely)
    sender.join(10)
    assert not sender.is_alive()
    assert error_of(future) == "Parallel DiT: the ranks were ended"
    with pytest.raises(RankError):
        pool.tell(m.Unload())


# Real ranks.


@pytest.fixture
def orders(tmp_path, monkeypatch):
    """`orders('1 crash')`: what ranks that are started in this test do from then on."""
    path = tmp_path / "orders"
    monkeypatch.setattr(launch, "rank_entry", lambda: functools.partial(acting_rank.acting, path))
    return path.write_text


def load(pool: Pool, path: Path, degrees: Degrees) -> RemoteTransformer:
    return on_ranks(pool, mini.opened(path), degrees, "fp32", "sdpa", nobody)


@pytest.mark.processes
def test_what_ranks_say_is_in_their_logs_and_warnings_are_shown(mini_file, given, orders, tmp_path, capfd):
    logs = tmp_path / "logs"
    with started_by(multiprocessing.get_context("spawn")):  # what is forked has the standard error of an earlier moment
        first = Pool(("cpu",), logs=logs)
    with contextlib.closing(first) as pool:
        orders("0 speak")
        load(pool, mini_file, Degrees()).predict(ModelCall(*given), nobody)
        (own,) = logs.iterdir()
        log = (own / "rank-0.log").read_text(encoding="utf-8")
        shown = capfd.readouterr().err
        for line in ("printed äöü", "INFO some.library: said quietly", "WARNING some.library: said loudly"):
            assert line in log
        assert "UserWarning: warned" in log and "written by native code" in log
        assert "rank 0 (cpu): said loudly" in shown and "UserWarning: warned" in shown
        assert "quietly" not in shown and "printed" not in shown
        orders("0 end")
        with pytest.raises(RankError) as error:
            pool_model = load(pool, mini_file, Degrees())
            pool_model.predict(ModelCall(*given), nobody)
    text = str(error.value)
    assert text.startswith("Parallel DiT: rank 0 (cpu) ended with exit code 3")
    assert "\nlast words\n" in text
    assert text.endswith(f"The ranks' logs: {own}")
    assert sorted(path.name for path in own.iterdir()) == ["rank-0.log"]
    assert "last words" in (own / "rank-0.log").read_text(encoding="utf-8")


@pytest.mark.processes
def test_a_crash_and_a_lack_of_memory_say_what_is_known(mini_file, given, orders):
    with contextlib.closing(Pool(("cpu",))) as pool:
        model = load(pool, mini_file, Degrees())
        orders("0 crash")
        with pytest.raises(RankError) as error:
            model.predict(ModelCall(*given), nobody)
        text = str(error.value)
        assert text.startswith("Parallel DiT: rank 0 (cpu) was killed by signal 11")
        assert "Fatal Python error: Segmentation fault" in text and " in crash" in text
        assert not pool.ranks.directory.exists()
    with contextlib.closing(Pool(("cpu",))) as pool:
        orders("0 run_out")
        with pytest.raises(RankError) as error:
            load(pool, mini_file, Degrees()).predict(ModelCall(*given), nobody)
        first, second, *_ = str(error.value).splitlines()
        assert first.startswith("Parallel DiT: rank 0 (cpu) failed in micro-step 1: OutOfMemoryError: CUDA out of memory.")
        assert second.startswith("The run was expected to take: cpu 12.7 MB of weights")
        assert "It would fit with weight_dtype" in second
        assert "Traceback (most recent call last):" in str(error.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("why", "said"),
    [(OSError("no more processes"), "no more processes"), (OSError(errno.EMFILE, ""), "open more files.*`ulimit -n`")],
)
def test_a_rank_that_cannot_be_started_leaves_nothing(monkeypatch, tmp_path, why, said):
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    started = []

    def start(self, index, plan, context):
        if index == 1:
            raise why
        real(self, index, plan, context)
        started.extend(self.pids)

    real = launch.LocalRanks._start
    monkeypatch.setattr(launch.LocalRanks, "_start", start)
    with pytest.raises((OSError, RuntimeError), match=said):
        Pool(("cpu", "cpu"))
    assert len(started) == 1
    assert wait_until_gone(started)
    assert not list(tmp_path.iterdir())


def test_a_second_close_returns_when_the_ranks_have_ended(pipe_pool, monkeypatch):
    """As of a prompt and of the end of ComfyUI: whoever is second would take memory that is not free yet."""
    pool, ranks = pipe_pool
    killing, go_on, kill = threading.Event(), threading.Event(), ranks.kill

    def slow_kill():
        killing.set()
        assert go_on.wait(30)
        kill()

    monkeypatch.setattr(ranks, "kill", slow_kill)
    with ThreadPoolExecutor(2) as threads:
        threads.submit(pool.close, False)
        assert killing.wait(30)
        second = threads.submit(pool.close)
        with pytest.raises(TimeoutError):
            second.result(0.3)
        go_on.set()
        second.result(30)
    assert pool.error is not None


def test_a_close_out_of_a_models_failure_does_not_wait_for_itself(pipe_pool):
    pool, _ = pipe_pool
    closed = []

    class Closing:
        part_ranks = ()

        def on_failure(self, error):
            pool.close()
            closed.append(error)

    pool.enter(model := Closing())
    pool._fail(RankError("it failed"))
    assert [str(error) for error in closed] == ["it failed"]
    del model
