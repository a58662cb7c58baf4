"""Bytes from a rank into the channel of a real pool."""

import random
import threading
import time
from multiprocessing import Pipe
from typing import Any

from parallel_backend.processes.pool import Pool, RankError, wait_for
from parallel_backend.wire import messages as m
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.rank_settings import StartSettings
from parallel_backend.wire.tcp import shutdown

from . import damage, messages
from .runner import Case

ERROR_SECONDS = 15.0
"""From the bytes to the error: one second at most on an idle machine, but for a message that never ends."""
SILENCE = 0.5


class Played:
    """The rank's side of a channel without a rank. `start` is what a Pool takes; one rank only."""

    def __init__(self, data: bytes):
        self.data, self.ends, self.pids, self.names, self.logs = data, {}, (0,), ("cpu",), None
        ours, self._theirs = Pipe(duplex=True)
        self.channels, self._answers = [Channel(ours)], Channel(self._theirs)

    def start(self, _start: StartSettings) -> "Played":
        threading.Thread(target=self._play, daemon=True).start()
        return self

    def _play(self) -> None:
        try:
            self._answers.send(m.Ready(0))
            self._answers.send(m.HeartbeatMessage(0, m.IDLE, 0, False))
            self._theirs._send(self.data)
            while not isinstance((asked := self._answers.receive()).message, m.Unload):
                pass
            self._answers.send(m.Unloaded(0), asked.request_id)
        except (EOFError, OSError):  # ended by kill
            return

    def how_ended(self, _rank: int) -> str | None:
        return None

    def log_tail(self, _rank: int) -> str:
        return ""

    def dump(self, _rank: int) -> None:
        pass

    def join(self, _seconds: float) -> None:
        pass

    def kill(self) -> None:
        shutdown(self._theirs)  # closed by two threads at once, it might be another connection that the second closes


def into_client(examples: list[Any]):
    """Bytes from a rank: either the pool ends with an error that names the rank, or it goes on."""

    def make(rng: random.Random) -> Case:
        if rng.random() < 0.3:
            data = messages.frames(rng.choice(examples))
        else:
            data = damage.bytes_of(rng, messages.frames(rng.choice(examples)))[: messages.STREAM_BYTES]

        def case() -> str:
            played = Played(data)
            pool = Pool(("cpu",), start=played.start, silence=SILENCE)
            try:
                answer = pool.ask(m.Unload(), m.Unloaded)
                wait_for(answer, within(ERROR_SECONDS))
                return "goes on"
            except RankError as error:
                assert "rank 0 (cpu)" in str(error), error
                return "refused" if "sent an invalid message" in str(error) else "ended"
            finally:
                pool.close(politely=False)

        return case

    return make


def within(seconds: float):
    """A poll that gives up."""
    deadline = time.monotonic() + seconds

    def poll() -> None:
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing happened for {seconds} s")

    return poll
