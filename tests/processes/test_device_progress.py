"""On a GPU the rank is blamed whose device is stuck, though its host is idle: heartbeats say where the device is.

The devices are those of tests/support/fake_cuda.py. A wait is what NCCL's is: work in the stream, nothing to the host.
"""

import ctypes
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.rank.comm import event_query
from parallel_backend.rank.comm.transfers import Clock, Elapsed, Traffic
from parallel_backend.wire import messages as m
from parallel_backend.wire.heartbeat import Heartbeat
from testing import mini
from tests.processes.test_watchdog import Played, step
from tests.support import fake_cuda

pytestmark = pytest.mark.threads


@dataclass
class Wait:
    """As torch.distributed's Work of NCCL."""

    cuda: fake_cuda.FakeCuda
    device: int

    def wait(self) -> None:
        self.cuda.issue(1.0, self.device)


class Stage:
    """A rank on the device of its number, as Engine.step leads it. Its host never waits."""

    def __init__(self, cuda: fake_cuda.FakeCuda, rank: int):
        cuda.set_device(rank)
        self.cuda, self.rank, self.heartbeat = cuda, rank, Heartbeat(m.IDLE)
        self.traffic = Traffic(torch.device("cuda", rank), self.heartbeat)

    def micro_step(self, seq: int, receives: bool) -> None:
        self.cuda.set_device(self.rank)
        self.heartbeat.doing = f"micro-step {seq}"
        self.traffic.mark(self.traffic.clock.now())
        if receives:
            self.traffic.start(lambda: Wait(self.cuda, self.rank)).wait()
        self.cuda.issue(1.0, self.rank)
        self.traffic.mark(self.traffic.clock.now(), idle=True)
        self.heartbeat.done()
        self.heartbeat.doing = m.IDLE

    def beat(self) -> m.HeartbeatMessage:
        self.heartbeat.ask()
        return self.heartbeat.beat(self.rank)

    def seen(self) -> tuple[str, bool]:
        beat = self.beat()
        return beat.doing, beat.waiting


@pytest.fixture
def stages():
    with fake_cuda.fake_cuda(fake_cuda.ADA, fake_cuda.ADA) as cuda:
        yield [Stage(cuda, rank) for rank in range(2)]


def test_the_stuck_stage_is_blamed_and_not_the_one_that_waits_for_it(stages):
    first, last = stages
    first.micro_step(7, receives=False)
    last.micro_step(7, receives=True)
    first.cuda.stuck = [True, True]
    last.heartbeat.doing = "micro-step 7"  # its host is: it copies the output
    assert [stage.seen() for stage in stages] == [("micro-step 7", False), ("micro-step 7", True)]
    played = Played()
    played.dog.sent(step(7))
    _, verdict = played.until(heard=lambda: [played.dog.heard(stage.rank, stage.beat()) for stage in stages])
    assert verdict.ranks == (0,)
    assert "last seen in micro-step 7" in verdict.text
    # The control: by what the hosts do it would be the other one.
    played = Played()
    played.dog.sent(step(7))
    hosts = [m.HeartbeatMessage(stage.rank, stage.heartbeat.doing, 0, stage.heartbeat.waiting) for stage in stages]
    _, verdict = played.until(heard=lambda: [played.dog.heard(beat.rank, beat) for beat in hosts])
    assert verdict.ranks == (1,)


def test_a_beat_follows_the_device_through_what_its_host_has_launched(stages):
    stage = stages[1]
    for seq in (3, 4):
        stage.micro_step(seq, receives=True)
    seen, progress = [], []
    for _ in range(5):
        seen.append(stage.seen())
        progress.append(stage.beat().progress)
        stage.cuda.advance(1.0, device=1)
    waits, computes = [(f"micro-step {seq}", True) for seq in (3, 4)], [(f"micro-step {seq}", False) for seq in (3, 4)]
    assert seen == [waits[0], computes[0], waits[1], computes[1], (m.IDLE, False)]
    assert progress == sorted(set(progress))  # each look finds more done
    assert stage.cuda.waits == 2  # of the two recorders, when they were made: a beat never waits


def test_before_its_first_work_the_device_is_on_the_way_to_it(stages):
    stage = stages[0]
    stage.cuda.issue(1.0)  # of loading, say
    stage.micro_step(1, receives=False)
    stage.heartbeat.doing = "loading"
    assert stage.seen() == ("micro-step 1", False)


def test_a_device_that_failed_keeps_its_place_and_the_beats_go_on(stages):
    stage = stages[0]
    stage.micro_step(5, receives=True)
    assert stage.seen() == ("micro-step 5", True)

    def query(event):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_cuda.FakeEvent, "query", query)
        assert stage.seen() == ("micro-step 5", True)


def test_a_driver_that_waits_for_a_first_launch_delays_no_beat(stages, monkeypatch):
    """The launch holds the lock of the device's context until its queue has room, and a query waits for that lock."""
    stage, context, asked = stages[1], threading.Lock(), threading.Event()
    query = fake_cuda.FakeEvent.query

    def locked_query(event) -> bool:
        asked.set()
        with context:
            return query(event)

    monkeypatch.setattr(fake_cuda.FakeEvent, "query", locked_query)
    stage.micro_step(5, receives=True)
    asking = threading.Thread(target=stage.heartbeat.ask)
    with context:
        asking.start()
        assert asked.wait(10)
        first = stage.heartbeat.beat(1)
        stage.heartbeat.done()
        later = stage.heartbeat.beat(1)
        assert 0 < first.unanswered < later.unanswered
        assert (later.doing, later.progress) == ("micro-step 5", first.progress + 1)
    asking.join(10)
    answered = stage.heartbeat.beat(1)
    assert (answered.doing, answered.waiting, answered.unanswered) == ("micro-step 5", True, 0.0)


def test_an_event_is_asked_by_a_call_that_lets_other_threads_of_python_run(monkeypatch):
    """torch's own query does not: a rank whose driver waits would send no heartbeats."""
    results = iter([0, 600, 719])
    event = SimpleNamespace(cuda_event=77, query=lambda: "torch's own, which raises")
    monkeypatch.setattr(event_query, "event_query", lambda: lambda handle: next(results) if handle == 77 else None)
    assert [event_query.has_passed(event) for _ in range(3)] == [True, False, "torch's own, which raises"]
    assert event_query.has_passed(SimpleNamespace(cuda_event=0, query=lambda: "never recorded")) == "never recorded"
    monkeypatch.undo()
    query = event_query.event_query()
    assert (query is not None) == bool(torch.version.cuda or torch.version.hip)
    assert query is None or not query._flags_ & ctypes._FUNCFLAG_PYTHONAPI  # ctypes keeps the lock for Python's own calls


def test_the_thread_that_asks_looks_on_the_ranks_own_device(stages):
    """A look from a thread whose device is another makes a context on that one, of hundreds of megabytes."""
    stages[1].micro_step(5, receives=True)
    found = []

    def look() -> None:
        stages[1].heartbeat.ask()
        found.append(torch.cuda.current_device())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [1]


def test_an_engine_marks_where_its_micro_steps_begin_wait_and_end(pools, mini_file, monkeypatch):
    marks: dict[str, list[tuple[str, bool, bool]]] = {}

    def mark(heartbeat, passed, waiting=False, idle=False):
        marks.setdefault(threading.current_thread().name, []).append((heartbeat.doing, waiting, idle))

    def on_stream(clock, device):
        clock.on_stream = True

    monkeypatch.setattr(Heartbeat, "mark", mark)
    monkeypatch.setattr(Clock, "__init__", on_stream)
    with fake_cuda.fake_cuda(fake_cuda.ADA):
        model = pools.mini(mini_file, Degrees(pipe=2), fresh=True)
        marks.clear()
        model.predict(ModelCall(*mini.inputs(batch=1)), lambda: None)
        model.close_run(model.open_run(), lambda: None)
    pools.forget(2)
    doing = "micro-step 1"
    begin, waits, computes, end = (doing, False, False), (doing, True, False), (doing, False, False), (doing, False, True)
    assert marks["rank 0"][:2] == [begin, end]
    assert marks["rank 1"] == [begin, waits, computes, end]


def test_seconds_are_added_up_early_without_waiting_for_the_newest(stages, monkeypatch):
    cuda, clock = stages[0].cuda, stages[0].traffic.clock
    cuda.set_device(0)
    monkeypatch.setattr(Elapsed, "UNREAD", 4)
    monkeypatch.setattr(Elapsed, "BATCH", 2)
    elapsed, sums = Elapsed(clock), cuda.waits
    for number in range(1, 7):
        cuda.stuck[0] = number == 6  # its host would wait for ever
        started = clock.now()
        cuda.issue(1.0)
        elapsed.add(started, clock.now())
        cuda.advance(1.0)
    assert cuda.waits == sums + 1
    cuda.stuck[0] = False
    assert elapsed.drain() == 6.0
