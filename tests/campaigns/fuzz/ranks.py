"""Bytes into the channel between the client and a rank: a real rank that reads them, and a real pool."""

import random
import struct
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
FOR_A_RANK = (m.Probe, m.Load, m.Unload, m.PutConditioning, m.Step, m.RunVAE, m.OpenRun, m.CloseRun, m.Adapt, m.Rescale)


def into_rank(examples: list[Any]):
    """Bytes that are no message for a rank: it ends, says why, and the next pool works."""

    def make(rng: random.Random) -> Case:
        data, why = bad_for_a_rank(rng, examples)

        def case() -> str:
            pool = Pool(("cpu",), silence=60.0)
            try:
                pool.ready.result(timeout=60)
                pool.ranks.channels[0].connection._send(data)
                if why == "ends too soon":  # nothing tells that from a client that is slow, but that it is gone
                    pool.ranks.channels[0].connection.close()
                error = wait_for_error(pool)
            finally:
                pool.close(politely=False)
            assert isinstance(error, RankError), error
            assert "rank 0 (cpu)" in str(error), error
            assert why == "ends too soon" or "BadMessage: " in str(error), error
            return why

        return case

    return make


def bad_for_a_rank(rng: random.Random, examples: list[Any]) -> tuple[bytes, str]:
    """What to send, and what is wrong with it."""
    while True:
        kind = rng.randrange(4)
        if kind == 0:
            sound = [example for example in examples if isinstance(example, FOR_A_RANK)]
            data = messages.frames(rng.choice(sound))
            return data[: rng.randrange(1, len(data))], "ends too soon"
        if kind == 1:
            return struct.pack("!i", rng.choice((2**31 - 1, 2**21, 2**20 + 1))) + bytes(64), "too long"
        header = messages.header(rng, examples)
        if len(header) <= 100_000 and messages.decode(header) == "refused":
            return struct.pack("!i", len(header)) + header, "no message"


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
                return "refused" if "sent what cannot be" in str(error) else "ended"
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


def wait_for_error(pool: Pool) -> Exception:
    poll = within(ERROR_SECONDS)
    while pool.error is None:
        poll()
        time.sleep(0.005)
    return pool.error
