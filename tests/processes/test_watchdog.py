"""Ranks that are stopped, that hang, that are slow: who is blamed, when, with what words, and that all else goes on.

The judge by itself, with a clock of the test's own; the pool over pipes without processes; and real ranks.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.registry import Registry
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Span
from parallel_backend.processes import local as launch
from parallel_backend.processes import watchdog
from parallel_backend.processes.failure_text import LESS_MEMORY, died, failed
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import Pool, RankError, wait_for
from parallel_backend.processes.rank_log import STACK_LINES, TAIL_LINES, tail
from parallel_backend.processes.watchdog import Verdict, Watchdog
from parallel_backend.wire import messages as m
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.heartbeat import Heartbeat, send_heartbeats
from parallel_backend.wire.tcp import shutdown
from testing import mini
from testing.fork_server import started_by
from testing.models import on_ranks
from tests.processes.test_failures import wait_until_gone
from tests.support import acting_rank
from tests.system.test_memory import CONFIG, write_random

SETUP = Setup(Path(), "fp32", ("cpu", "cpu"), Degrees(pipe=2), "auto")
ROOT = Path(__file__).resolve().parents[2]
NEVER = 1e9
"""Seconds, for limits that a test must not come to."""


def nothing() -> None:
    """A Poll that never gives up."""


# The judge.


class Played:
    """A Watchdog of two ranks, and what they would send. One call of `second` is a second."""

    def __init__(self, ready: bool = True, **limits: float):
        self.dog = Watchdog(2, silence=20.0)
        for name, value in limits.items():
            setattr(self.dog, name, value)
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

    def second(self, awaited=(), blocked=(False, False), turned: bool = True, seconds: float = 1.0) -> Verdict | None:
        self.dog.turns += turned
        return self.dog.tick(seconds, awaited, blocked)

    def until(self, limit: int = 5000, heard=lambda: None, **named) -> tuple[int, Verdict | None]:
        """The second in which a verdict comes, and the verdict; the limit and None if none does."""
        for count in range(1, limit + 1):
            heard()
            if (verdict := self.second(**named)) is not None:
                return count, verdict
        return limit, None


def step(seq: int, tokens: int = 100, conditioning: int = 1) -> m.Step:
    span = Span(0, tokens)
    return m.Step(seq, 0, conditioning, span, True, False, True, Span(0, 1), torch.ones(1), {}, (), None)


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
    assert verdict.text.startswith("gave no sign of life for 20 s, last seen in micro-step 12. It was stopped")


def test_any_message_is_a_sign_of_life():
    played = Played()
    played.until(15, heard=lambda: played.beat(0))
    played.dog.heard(1, m.Loading(1, 0.5))
    count, verdict = played.until(heard=lambda: played.beat(0))
    assert (count, verdict.ranks) == (20, (1,))


def test_ranks_at_rest_may_rest_for_ever():
    played = Played()
    assert played.until(heard=lambda: [played.beat(rank) for rank in range(2)])[1] is None


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
    assert verdict.text.startswith("came no further for 1800 s, last seen in micro-step 1.")


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
    assert count == 1800
    assert verdict is not None


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


def test_an_output_before_the_last_part_of_its_step_is_sent_leaves_nothing_open():
    played = Played()
    played.dog.sent(step(1))
    played.dog.heard(0, m.Output(0, 1, torch.ones(1)))
    played.dog.sent(step(1))  # to the other rank
    assert played.until(heard=lambda: [played.beat(rank) for rank in range(2)])[1] is None
    assert played.dog._steps == {(None, 1): None}


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


def test_what_is_known_of_one_models_micro_steps_says_nothing_of_anothers():
    played = Played()
    for model in (1, 2):
        played.dog.sent(step(1), model)
    played.dog.heard(1, m.Output(1, 1, torch.ones(1)), 1)
    assert played.dog._steps == {(1, 1): None, (2, 1): (1, 100)}
    played.dog.sent(m.Unload(), 1)
    assert (played.dog._largest, list(played.dog._steps)) == ({}, [(2, 1)])


def test_the_end_of_a_long_micro_step_is_no_stall():
    """Of a GPU that computes for long what its host had launched at once: no beat says so before the output is there."""
    played = Played()
    played.dog.sent(step(1))
    played.until(300, heard=working(played, 1))
    played.dog.heard(1, m.Output(1, 1, torch.ones(1)))
    assert played.until(1000, heard=working(played, 1))[1] is None


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


def test_an_output_that_never_comes_is_missed_though_all_ranks_are_idle():
    played = Played()

    def idle() -> None:
        for rank in range(2):
            played.beat(rank)

    played.dog.sent(step(1))
    count, verdict = played.until(heard=idle)
    assert (count, verdict.ranks) == (1800, (0, 1))  # a first one
    assert verdict.text.startswith("left a request unanswered")
    played = Played()
    played.dog.sent(step(1))
    played.dog.heard(1, m.Output(1, 1, torch.ones(1)))
    assert played.until(heard=idle) == (5000, None)


def test_progress_of_one_rank_is_enough():
    played = Played()
    measured(played, 1)
    played.dog.sent(step(2))

    def beats() -> None:
        played.beat(0, "micro-step 2", done=1)
        played.beat(1, "micro-step 2", waiting=True)

    assert played.until(heard=beats)[1] is None


def test_words():
    text = failed("rank 0 (cuda:0)", "micro-step 3", "OutOfMemoryError: CUDA out of memory.\nmore")
    first, second = text.splitlines()
    assert first == "rank 0 (cuda:0) failed in micro-step 3: OutOfMemoryError: CUDA out of memory."
    assert second.endswith(LESS_MEMORY)
    assert failed("rank 0 (cpu)", "loading", "KeyError: 1\n2") == "rank 0 (cpu) failed in loading: KeyError: 1"
    assert failed("rank 0 (cpu)", "loading", "") == "rank 0 (cpu) failed in loading: "
    killed = died("rank 1 (cpu)", "was killed by signal 9", "micro-step 3", "")
    assert "was cut or overwritten" in died("rank 1 (cpu)", f"was killed by signal {int(signal.SIGBUS)}", "loading", "")
    assert killed.startswith("rank 1 (cpu) was killed by signal 9, last seen in micro-step 3. If the system ended it")
    assert "pipefusion_degree" in killed
    assert died("rank 1 (cpu)", "ended with exit code 3", m.IDLE, "").endswith(" ended with exit code 3, last seen idle.")
    assert died("rank 1 (cpu)", "ended with exit code 3", "", "std::bad_alloc").endswith(LESS_MEMORY)


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
        self._mute = threading.Event()
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


def test_a_rank_that_falls_silent(pipe_pool):
    pool, ranks = pipe_pool
    future = pool.ask(m.Unload(), m.Unloaded)
    ranks.alive[1] = False
    text = error_of(future)
    assert text.startswith("Parallel DiT: rank 1 (cpu) gave no sign of life for 1 s, last seen in micro-step 7.")
    assert text.endswith("The end of its log:\nlog of rank 1")
    with pytest.raises(RankError):
        pool.send(0, m.Unload())


class AskingRanks(PipeRanks):
    """They beat as the product's. The driver of rank 1 answers once `answers` is set."""

    def __init__(self, start: launch.StartSettings):
        self.answers = threading.Event()
        super().__init__(start)

    def _beat(self, rank: int, seconds: float) -> None:
        heartbeat = Heartbeat("micro-step 7", waiting=rank == 0, memory=functools.partial(self._ask, rank))
        send_heartbeats(heartbeat, rank, self.theirs[rank], seconds)

    def _ask(self, rank: int) -> tuple[int, int]:
        if rank == 1:
            self.answers.wait(60)
        return 5, 9


def test_a_driver_that_does_not_answer_silences_no_rank(monkeypatch):
    monkeypatch.setattr(watchdog, "UNANSWERED_SECONDS", 0.5)
    with contextlib.closing(Pool(("cpu", "cpu"), start=AskingRanks, silence=1.0)) as pool:
        pool.ready.result(timeout=10)
        while pool.watchdog.beat(1).unanswered < 2.0:  # longer than the silence that would end it
            assert pool.error is None
            time.sleep(0.1)
        assert pool.watchdog.beat(0).unanswered < 1.0
        pool.watchdog.stall = 1.0
        text = error_of(pool.ask(m.Unload(), m.Unloaded))
        assert text.startswith("Parallel DiT: rank 1 (cpu) came no further for 1 s, last seen in micro-step 7. The GPU's d")
        pool.ranks.answers.set()


@pytest.mark.slow
def test_without_the_judge_nobody_would_notice(pipe_pool, monkeypatch):
    """The control of the tests around it."""
    pool, ranks = pipe_pool
    monkeypatch.setattr(pool.watchdog, "tick", lambda *_: None)
    future = pool.ask(m.Unload(), m.Unloaded)
    ranks.alive[1] = False
    with pytest.raises(FutureTimeout):
        future.result(timeout=3)


def test_a_rank_that_hangs_is_asked_where(pipe_pool):
    pool, ranks = pipe_pool
    pool.watchdog.stall = 1.0
    text = error_of(pool.ask(m.Unload(), m.Unloaded))
    assert text.startswith("Parallel DiT: rank 1 (cpu) came no further for 1 s, last seen in micro-step 7.")
    assert ranks.dumped == [0, 1]
    assert text.endswith("log of rank 1 with stacks")


def test_a_rank_that_ends_in_the_middle_of_a_message(pipe_pool):
    """Then the pool's own thread is blocked, and cannot hear the other rank either."""
    pool, ranks = pipe_pool
    future = pool.ask(m.Unload(), m.Unloaded)
    ranks.alive[0] = False
    with ranks.theirs[0]._sending:
        ranks.theirs[0].connection.send_bytes(m.encode(m.Output(0, 1, torch.ones(4)))[0])
        text = error_of(future)
    assert "rank 0 (cpu) gave no sign of life" in text


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
    assert str(pool.error).startswith("Parallel DiT: what was being sent to the ranks was cut short by KeyboardInterrupt")
    assert len(failures) == 1


def test_a_request_that_reaches_no_rank_leaves_nothing_to_wait_for(pipe_pool):
    pool, _ = pipe_pool
    step = m.Step(1, 0, 7, Span(0, 8), True, False, True, Span(0, 1), torch.ones(1), {}, (), torch.ones(1).to_sparse())
    pool.watchdog.first = pool.watchdog.stall = 0.5
    with pytest.raises(RuntimeError):
        pool.ask(step, m.Output)
    assert not pool._gathers.awaited
    assert not pool.watchdog._steps
    pool.tell(m.Unload())
    assert pool.error is None


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
    assert "rank 1 (cpu) gave no sign of life" in error_of(future)
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


def test_who_waits_is_let_go_though_the_ranks_cannot_be_killed(pipe_pool, monkeypatch):
    pool, ranks = pipe_pool
    future, failures = pool.ask(m.Unload(), m.Unloaded), []
    place = ModelRanks(pool)
    place.listen(lambda output: None, failures.append)

    def refuse() -> None:
        raise PermissionError("not allowed")

    with monkeypatch.context() as patch:
        patch.setattr(ranks, "kill", refuse)
        with pytest.raises(PermissionError):
            pool.close()
    assert error_of(future) == "Parallel DiT: the ranks were ended"
    assert len(failures) == 1
    ranks.kill()


def test_polite_closing_asks(pipe_pool):
    pool, ranks = pipe_pool
    closing = threading.Thread(target=pool.close)
    closing.start()
    assert isinstance(ranks.theirs[0].receive().message, m.Stop)
    assert isinstance(ranks.theirs[1].receive().message, m.Stop)
    closing.join(10)


# Logs.


def test_the_end_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_text("")
    assert tail(log) == ""
    log.write_text("\n".join(f"line {number}" for number in range(100_000)))
    assert tail(log).splitlines() == [f"line {number}" for number in range(100_000 - TAIL_LINES, 100_000)]
    log.write_text("x" * 1000)
    assert len(tail(log)) < 500
    stack = ["Thread 0x1 (most recent call first):", '  File "other"', "", "Current thread 0x2 (most recent call first):"]
    log.write_text("\n".join(["before"] * 50 + stack + [f'  File "{number}"' for number in range(100)]))
    lines = tail(log).splitlines()
    assert lines[:2] == ["Current thread 0x2 (most recent call first):", '  File "0"']
    assert len(lines) == STACK_LINES


# Real ranks.

SILENCE = 3.0
BOUND = SILENCE + 20.0
"""Seconds from the stop of a rank to its error that tests allow; the machine may be busy with others."""


class Kept:
    """A pool with little patience for silence, made again when it has failed, and the tiny model on it."""

    def __init__(self, path: Path):
        self.path, self._pool = path, None

    def pool(self) -> Pool:
        if self._pool is None or self._pool.error is not None:
            self.close()
            self._pool = Pool(("cpu", "cpu"), silence=SILENCE)
            self._pool.ready.result(timeout=300)
        return self._pool

    def model(self, degrees: Degrees) -> RemoteTransformer:
        return on_ranks(self.pool(), mini.opened(self.path), degrees, "fp32", "sdpa", nothing)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


@pytest.fixture(scope="module")
def kept(mini_file):
    kept = Kept(mini_file)
    yield kept
    kept.close()


@pytest.fixture(scope="module")
def given():
    return mini.inputs()


@pytest.fixture(scope="module")
def expected(mini_model, given):
    return mini.reference(mini_model, *given)


def works(kept: Kept, given, expected, degrees: Degrees | None = None) -> None:
    """The next prompt does."""
    assert mini.relative(kept.model(degrees or Degrees(pipe=2)).predict(ModelCall(*given), nothing), expected) <= 1e-5


def stop(pool: Pool, rank: int) -> float:
    os.kill(pool.pids[rank], signal.SIGSTOP)
    return time.monotonic()


def stopped(rank: int, doing: str) -> str:
    return rf"rank {rank} \(cpu\) gave no sign of life for {SILENCE:.0f} s, last seen {doing}\."


def wait_for_error(pool: Pool, since: float) -> str:
    while pool.error is None and time.monotonic() - since < BOUND:
        time.sleep(0.05)
    assert isinstance(pool.error, RankError)
    return str(pool.error)


@pytest.mark.processes
def test_a_rank_stopped_at_rest(kept, given, expected, measured_bound):
    works(kept, given, expected)
    pool = kept.pool()
    time.sleep(2 * SILENCE / 5)  # until a beat says that it rests
    since = stop(pool, 1)
    assert re.search(stopped(1, "idle"), wait_for_error(pool, since))
    measured_bound(since)
    assert wait_until_gone(pool.pids)
    works(kept, given, expected)


@pytest.fixture(scope="module")
def measured_bound(measured):
    def note(since: float) -> None:
        seconds = time.monotonic() - since
        measured(f"seconds from SIGSTOP to the error, silence {SILENCE:.0f} s", seconds)
        assert SILENCE * 0.7 < seconds < BOUND

    return note


@pytest.mark.processes
@pytest.mark.parametrize(
    ("degrees", "victim"),
    [
        (Degrees(pipe=2), 0),
        (Degrees(ulysses=2), 1),
        pytest.param(Degrees(pipe=2), 1, marks=pytest.mark.full),
        pytest.param(Degrees(ulysses=2), 0, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_rank_stopped_in_micro_steps(kept, given, expected, measured_bound, degrees, victim):
    model = kept.model(degrees)
    since = []

    def later() -> None:
        time.sleep(0.5)
        since.append(stop(model.pool, victim))

    thread = threading.Thread(target=later)
    thread.start()
    with pytest.raises(RankError, match=stopped(victim, "[^.]+")):
        while True:
            model.predict(ModelCall(*given), nothing)
    thread.join()
    measured_bound(since[0])
    assert wait_until_gone(model.pool.pids)
    works(kept, given, expected, degrees)


@pytest.mark.processes
def test_a_rank_stopped_while_it_loads(kept, given, expected, tmp_path, measured_bound):
    path = tmp_path / "large.safetensors"
    write_random(path, CONFIG | {"double_blocks": 1, "single_blocks": 4})
    pool, since = kept.pool(), []

    def progress(doing: str, fraction: float) -> None:
        if doing == "loading" and fraction > 0 and not since:
            since.append(stop(pool, 1))

    # The first rank's progress stops the second, whose last beat may be from before it began to load.
    with pytest.raises(RankError, match=stopped(1, "[^.]+")):
        on_ranks(pool, mini.opened(path), Degrees(pipe=2), "fp32", "sdpa", nothing, "even", progress)
    path.unlink()
    measured_bound(since[0])
    works(kept, given, expected)


def wait_until_seen(pool: Pool, rank: int) -> None:
    deadline = time.monotonic() + 300
    while not pool.watchdog.doing(rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pool.watchdog.doing(rank)


@pytest.mark.processes
@pytest.mark.usefixtures("spawned")
def test_ranks_stopped_in_start_up():
    with contextlib.closing(Pool(("cpu", "cpu"), silence=SILENCE)) as pool:
        stop(pool, 1)
        wait_until_seen(pool, 0)
        pool.watchdog.start = 1.0
        with pytest.raises(RankError, match=r"rank 1 \(cpu\) did not start within 1 s"):
            pool.ready.result(timeout=BOUND)
        assert wait_until_gone(pool.pids)
    with contextlib.closing(Pool(("cpu", "cpu"), silence=SILENCE)) as pool:
        stop(pool, 0)
        wait_until_seen(pool, 1)
        stop(pool, 1)
        with pytest.raises(RankError, match=stopped(1, "in start-up")):
            pool.ready.result(timeout=BOUND)


@pytest.mark.processes
def test_a_stopped_rank_that_takes_no_more_is_killed_under_the_sender(kept, given, expected):
    """One thread sends megabytes to the stopped rank and holds the client's lock, another one computes on the other rank."""
    model = kept.model(Degrees(batch=2))
    x, timestep, tensors = (value[:1] for value in (given[0], given[1], given[2]["context"]))
    one = {name: tensor[:1] for name, tensor in given[2].items()}
    large = one | {"context": torch.randn(1, 200_000, tensors.shape[-1])}
    errors = []

    def compute() -> None:
        try:
            while True:
                model.predict(ModelCall(x, timestep, one, first_replica=0), nothing)
        except RankError as error:
            errors.append(error)

    model.predict(ModelCall(x, timestep, one, first_replica=0), nothing)
    since = stop(model.pool, 1)
    thread = threading.Thread(target=compute)
    thread.start()
    with pytest.raises(RankError, match=r"rank 1 \(cpu\) gave no sign of life"):
        model.predict(ModelCall(x, timestep, large, first_replica=1), nothing)
    assert time.monotonic() - since < BOUND
    thread.join(BOUND)
    assert len(errors) == 1
    works(kept, given, expected)


@pytest.mark.processes
def test_unloading_a_stopped_rank_ends(mini_file, given, expected):
    registry = Registry()
    key = mini.setup(mini_file, "fp32", ("cpu", "cpu"), Degrees(pipe=2), "sdpa", "even")
    with contextlib.closing(registry):
        model = registry.model(key, nothing)
        model.pool.watchdog.silence = SILENCE
        since = stop(model.pool, 0)
        registry.unload()
        assert time.monotonic() - since < BOUND
        assert mini.relative(registry.model(key, nothing).predict(ModelCall(*given), nothing), expected) <= 1e-5


@pytest.mark.processes
def test_closing_with_a_stopped_rank(kept):
    pool = kept.pool()
    stop(pool, 1)
    since = time.monotonic()
    pool.close()
    assert time.monotonic() - since < BOUND
    assert wait_until_gone(pool.pids, 1.0)
    kept._pool = None


@pytest.mark.processes
@pytest.mark.full
def test_a_client_that_was_stopped_blames_nobody(mini_file):
    """Stopped for longer than it lets ranks be silent."""
    script = (
        "import sys, time\n"
        "from parallel_backend.processes.pool import Pool\n"
        "if __name__ == '__main__':\n"
        "    pool = Pool(('cpu',), silence=2.0)\n"
        "    pool.ready.result()\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    time.sleep(3)\n"
        "    print(pool.error, flush=True)\n"
        "    pool.close()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"None\n"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def orders(tmp_path, monkeypatch):
    """`orders('1 sleep')`: what ranks that are started in this test do from then on."""
    path = tmp_path / "orders"
    monkeypatch.setattr(launch, "rank_entry", lambda: functools.partial(acting_rank.acting, path))
    return path.write_text


def load(pool: Pool, path: Path, degrees: Degrees) -> RemoteTransformer:
    return on_ranks(pool, mini.opened(path), degrees, "fp32", "sdpa", nothing)


@pytest.mark.alone
@pytest.mark.full
def test_ranks_that_are_slow_and_get_slower_are_left_alone(mini_file, given, expected, orders):
    """Each block of a micro-step takes twice as long as the one before. Then one hangs in Python."""
    with contextlib.closing(Pool(("cpu", "cpu"), silence=SILENCE)) as pool:
        model = load(pool, mini_file, Degrees(ulysses=2))
        model.predict(ModelCall(*given), nothing)
        pool.watchdog.stall = 2.0
        orders("0 slow_down")
        assert mini.relative(model.predict(ModelCall(*given), nothing), expected) <= 1e-5
        deadline = time.monotonic() + 30
        while pool.watchdog._longest <= 2.0 and time.monotonic() < deadline:  # the last block is counted at the next tick
            time.sleep(0.05)
        assert pool.watchdog._longest > 2.0  # the control: longer than what is allowed where nothing was measured
        pool.watchdog.factor = 0.0
        orders("1 sleep")
        with pytest.raises(RankError) as error:
            model.predict(ModelCall(*given), nothing)
        text = str(error.value)
        assert text.startswith("Parallel DiT: rank 1 (cpu) came no further for 2 s, last seen in micro-step 3.")
        assert "Current thread" in text
        assert "acting_rank.py" in text and " in sleep" in text
        assert wait_until_gone(pool.pids)


@pytest.mark.processes
def test_the_first_micro_step_is_given_time(mini_file, given, expected, orders):
    """The control of the test before: limits of what is known do not hold for it."""
    with contextlib.closing(Pool(("cpu", "cpu"), silence=SILENCE)) as pool:
        model = load(pool, mini_file, Degrees(pipe=2))
        pool.watchdog.stall, pool.watchdog.first, pool.watchdog.factor = 0.5, 2.0, 0.0
        orders("1 sleep")
        with pytest.raises(RankError, match=r"rank 1 \(cpu\) came no further for 2 s, last seen in micro-step 1\."):
            model.predict(ModelCall(*given), nothing)


@pytest.mark.processes
def test_what_ranks_say_is_in_their_logs_and_warnings_are_shown(mini_file, given, orders, tmp_path, capfd):
    logs = tmp_path / "logs"
    with started_by(multiprocessing.get_context("spawn")):  # what is forked has the standard error of an earlier moment
        first = Pool(("cpu",), logs=logs)
    with contextlib.closing(first) as pool:
        orders("0 speak")
        load(pool, mini_file, Degrees()).predict(ModelCall(*given), nothing)
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
            pool_model.predict(ModelCall(*given), nothing)
    text = str(error.value)
    assert text.startswith("Parallel DiT: rank 0 (cpu) ended with exit code 3")
    assert "\nlast words\n" in text
    assert text.endswith(f"The ranks' logs: {own}")
    assert sorted(path.name for path in own.iterdir()) == ["rank-0.log"]
    assert "last words" in (own / "rank-0.log").read_text(encoding="utf-8")


@pytest.mark.processes
def test_a_crash_and_a_lack_of_memory_say_what_is_known(mini_file, given, expected, orders):
    with contextlib.closing(Pool(("cpu",))) as pool:
        model = load(pool, mini_file, Degrees())
        orders("0 crash")
        with pytest.raises(RankError) as error:
            model.predict(ModelCall(*given), nothing)
        text = str(error.value)
        assert text.startswith("Parallel DiT: rank 0 (cpu) was killed by signal 11")
        assert "Fatal Python error: Segmentation fault" in text and " in crash" in text
        assert not pool.ranks.directory.exists()
    with contextlib.closing(Pool(("cpu",))) as pool:
        orders("0 run_out")
        with pytest.raises(RankError) as error:
            load(pool, mini_file, Degrees()).predict(ModelCall(*given), nothing)
        first, second, *_ = str(error.value).splitlines()
        assert first.startswith("Parallel DiT: rank 0 (cpu) failed in micro-step 1: OutOfMemoryError: CUDA out of memory.")
        assert second.startswith("The run was expected to take: cpu 12.7 MB of weights")
        assert "It would fit with weight_dtype" in second
        assert "Traceback (most recent call last):" in str(error.value)


@pytest.mark.processes
def test_logs_that_cannot_be_kept_are_no_reason_not_to_start(tmp_path, caplog):
    (tmp_path / "file").touch()
    with contextlib.closing(Pool(("cpu",), logs=tmp_path / "file" / "logs")) as pool:
        pool.ready.result(timeout=300)
        assert (pool.ranks.directory / "rank-0.log").exists()
    assert "logs cannot be kept" in caplog.text


@pytest.mark.processes
def test_a_rank_that_cannot_be_started_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    started = []

    def start(self, index, plan, context):
        if index == 1:
            raise OSError("no more processes")
        real(self, index, plan, context)
        started.extend(self.pids)

    real = launch.LocalRanks._start
    monkeypatch.setattr(launch.LocalRanks, "_start", start)
    with pytest.raises(OSError, match="no more processes"):
        Pool(("cpu", "cpu"))
    assert len(started) == 1
    assert wait_until_gone(started)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_may_not_open_more_files_says_so():
    text = failed("rank 0 (cpu)", "loading", "OSError: [Errno 24] Too many open files\nmore")
    assert text.startswith("rank 0 (cpu) failed in loading: OSError: [Errno 24] Too many open files\n")
    assert text.endswith("`ulimit -n` gives a larger number.")


def test_a_second_close_returns_when_the_ranks_have_ended(pipe_pool, monkeypatch):
    """As of a prompt and of the end of ComfyUI: whoever is second would take memory that is not free yet."""
    pool, ranks = pipe_pool
    killing, go_on, kill = threading.Event(), threading.Event(), ranks.kill

    def slow_kill():
        killing.set()
        assert go_on.wait(30)
        kill()

    monkeypatch.setattr(ranks, "kill", slow_kill)
    first = threading.Thread(target=pool.close, args=(False,))
    second = threading.Thread(target=pool.close)
    first.start()
    assert killing.wait(30)
    second.start()
    second.join(0.3)
    assert second.is_alive()
    go_on.set()
    second.join(30)
    assert not second.is_alive()
    assert pool.error is not None
    first.join(30)


def test_a_close_out_of_a_models_failure_does_not_wait_for_itself(pipe_pool):
    pool, _ = pipe_pool
    closed = []

    class Closing:
        def on_failure(self, error):
            pool.close()
            closed.append(error)

    pool.enter(model := Closing())
    pool._fail(RankError("it failed"))
    assert [str(error) for error in closed] == ["it failed"]
    del model


TOO_FEW_FILES = """
import gc, os, resource, sys
from parallel_backend.processes import local
from parallel_backend.processes.pool import Pool
from tests.support.idle_rank import idle

local.tempfile.tempdir = sys.argv[1]
free = [os.open(os.devnull, os.O_RDONLY) for _ in range(6)]
for each in free:
    os.close(each)
limit, before = resource.getrlimit(resource.RLIMIT_NOFILE), set(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, limit[1]))
try:
    Pool(("cpu", "cpu"), start=lambda start: local.LocalRanks(start, idle))
except RuntimeError as error:
    said = str(error)
resource.setrlimit(resource.RLIMIT_NOFILE, limit)
gc.collect()
assert not os.listdir(sys.argv[1])
assert set(os.listdir("/proc/self/fd")) <= before
print(said)
"""
"""In a process of its own: threads and ranks of other tests open and close files meanwhile."""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX's limit")
def test_too_few_files_that_may_be_open_are_named(tmp_path):
    command = [sys.executable, "-c", TOO_FEW_FILES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.match(r"Parallel DiT: 2 ranks cannot be started.*open files.*`ulimit -n`", done.stdout)


def test_wait_for_takes_the_pools_error(pipe_pool):
    pool, ranks = pipe_pool
    ranks.alive[0] = False
    with pytest.raises(RankError, match=r"rank 0 \(cpu\) gave no sign of life"):
        wait_for(pool.ask(m.Unload(), m.Unloaded), nothing)
