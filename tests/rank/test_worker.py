"""What a rank's worker does when it can hear the client no more."""

import os
from datetime import timedelta
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from parallel_backend.rank import worker as worker_module
from parallel_backend.rank.worker import READING, Worker
from parallel_backend.wire import messages as m
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.encoding import BadMessage
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.rank_settings import RankSettings


class Ended(BaseException):
    """In the place of the process's end."""


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """A Worker, whose process ends by `Ended`, and the client's end of its channel."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(worker_module, "os", SimpleNamespace(_exit=end))
    ours, theirs = Pipe(duplex=True)
    client, channel = Channel(ours), Channel(theirs)
    settings = RankSettings(("cpu",), 1, timedelta(1), rank=0, rendezvous=tmp_path / "ranks" / "store")
    os.makedirs(settings.rendezvous.parent)
    yield Worker(settings, channel, Heartbeat(), None), client
    client.close()
    channel.close()


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: capturing"), BadMessage("no message"), SystemExit(3)])
def test_whatever_ends_its_hearing_ends_the_rank_and_is_told(worker, monkeypatch, error):
    rank, client = worker

    def receive() -> m.Envelope:
        raise error

    monkeypatch.setattr(rank.channel, "receive", receive)
    with pytest.raises(Ended, match="1"):
        rank._read()
    failure = client.receive().message
    assert (failure.rank, failure.doing, failure.peer) == (0, READING, False)
    assert failure.summary == f"{type(error).__name__}: {error}"
    assert "in receive" in failure.traceback


def test_a_client_that_is_gone_ends_the_rank_in_peace(worker):
    rank, client = worker
    client.close()
    with pytest.raises(Ended, match="0"):
        rank._read()
    assert not rank.settings.rendezvous.parent.exists()
