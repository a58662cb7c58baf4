"""On a GPU the rank is blamed whose device is stuck, though its host is idle: heartbeats say where the device is.

The devices are those of testing/fake_cuda.py. A wait is what NCCL's is: work in the stream, nothing to the host.
"""

import threading
from dataclasses import dataclass

import pytest
import torch

from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.wire import messages as m
from parallel_backend.wire.heartbeat import Heartbeat
from testing import fake_cuda
from tests.processes.test_watchdog import Played, step

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
