"""Control connections over TCP: who knows the key gets in, once; others are refused and keep nobody waiting."""

import contextlib
import json
import os
import pickle
import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import psutil
import pytest
import torch

from parallel_backend.wire import tcp as dialling
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.lifecycle import Ready
from parallel_backend.wire.messages import BadMessage
from parallel_backend.wire.sampling import Output
from parallel_backend.wire.tcp import HELLO, Listener, dial, is_closed

HOST = "127.0.0.1"


@pytest.fixture
def key() -> bytes:
    return secrets.token_bytes(32)


@pytest.fixture
def reception(key) -> Iterator[Listener]:
    reception = Listener(HOST, key, 2)
    yield reception
    reception.close()


class Rank:
    """Dials in on a thread of its own, as the handshake takes both ends."""

    def __init__(self, address, key: bytes, rank: int):
        self.connection = self.error = None
        self._thread = threading.Thread(target=self._dial, args=(address, key, rank), daemon=True)
        self._thread.start()

    def _dial(self, *arguments):
        try:
            self.connection = dial(*arguments)
        except (AuthenticationError, EOFError, OSError) as error:
            self.error = error

    def join(self) -> "Rank":
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self


def receive(reception: Listener, seconds: float = 30.0):
    return reception.receive(seconds, lambda: None)


def close(callers, ranks) -> None:
    for connection in (*(caller.connection for caller in callers), *(rank.join().connection for rank in ranks)):
        connection.close()


def listening() -> list[int]:
    return [c.laddr.port for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]


def test_ranks_come_in_order_whoever_dials_first(reception, key):
    late = [Rank(reception.address, key, rank) for rank in (1, 0)]
    callers = receive(reception)
    assert [caller.pid for caller in callers] == [os.getpid()] * 2
    ranks = [rank.join().connection for rank in reversed(late)]
    for number, (caller, connection) in enumerate(zip(callers, ranks, strict=True)):
        ours, theirs = Channel(caller.connection), Channel(connection)
        with contextlib.closing(ours), contextlib.closing(theirs):
            theirs.send(Ready(number))
            assert ours.receive().message == Ready(number)
            values = torch.arange(6.0).reshape(1, 2, 3)
            theirs.send(Output(number, 1, values))
            assert torch.equal(ours.receive().message.value, values)


def test_a_wrong_key_is_refused_and_the_right_one_still_gets_in(reception, key):
    wrong = Rank(reception.address, secrets.token_bytes(32), 0)
    right = [Rank(reception.address, key, rank) for rank in (0, 1)]
    callers = receive(reception)
    assert isinstance(wrong.join().error, AuthenticationError)
    assert all(rank.join().connection is not None for rank in right)
    close(callers, right)


def test_a_stranger_that_goes_on_after_its_refusal_is_not_let_in(reception, key):
    """It takes both parts of the handshake, but has no proof for the first."""
    with ThreadPoolExecutor(1) as thread:
        callers = thread.submit(receive, reception)
        with Client(reception.address) as stranger, pytest.raises((EOFError, OSError)):
            stranger.recv_bytes()
            stranger.send_bytes(b"no proof")
            stranger.recv_bytes()
            stranger.send_bytes(b"#CHALLENGE#" + bytes(20))
            stranger.recv_bytes()
            stranger.send_bytes(b"#WELCOME#")
            stranger.send_bytes(HELLO.pack(0, os.getpid()))
            assert stranger.poll(5), "it was let in"
            stranger.recv_bytes()
        ranks = [Rank(reception.address, key, rank) for rank in (0, 1)]
        close(callers.result(), ranks)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        b"\xff" * 64,  # a length of many GB
        b"\x00\x00\x00\x05hello",
        pickle.dumps({"rank": 0}),
        json.dumps({"rank": 0}).encode(),
        b"",
    ],
)
def test_garbage_is_refused_and_ranks_still_get_in(reception, key, said):
    with socket.create_connection(reception.address) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        ranks = [Rank(reception.address, key, rank) for rank in (0, 1)]
        callers = receive(reception)
        stranger.settimeout(30)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(1 << 16):  # the challenge, then it is hung up on
                pass
    close(callers, ranks)


@pytest.mark.parametrize("silent", [3, dialling.MAX_UNAUTHENTICATED], ids=["a few", "as many as may"])
@pytest.mark.slow
def test_silent_callers_are_hung_up_on_and_ranks_get_in(reception, key, monkeypatch, silent):
    monkeypatch.setattr(dialling, "HANDSHAKE_SECONDS", 1.0)
    silent = [socket.create_connection(reception.address) for _ in range(silent)]
    ranks = [Rank(reception.address, key, rank) for rank in (0, 1)]
    callers = receive(reception)
    for stranger in silent:
        with stranger:
            stranger.settimeout(30)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(1 << 16):
                    pass
    close(callers, ranks)


def is_hung_up_on(connection) -> bool:
    """Whether the other end closes within half a minute. Nothing has been sent that could be read."""
    with contextlib.suppress(ConnectionError):
        return connection.poll(30) and is_closed(connection)
    return True


def test_ranks_that_are_not_expected_are_refused(reception, key):
    """One that is there already, and two that there are not."""
    first = Rank(reception.address, key, 0)
    with pytest.raises(TimeoutError, match="no word from rank 1 within"):
        receive(reception, 1.0)
    others = [Rank(reception.address, key, number) for number in (0, 2, 2**32 - 1)]
    with pytest.raises(TimeoutError, match="no word from rank 1 within"):
        receive(reception, 1.0)
    for refused in (other.join().connection for other in others):
        assert is_hung_up_on(refused)
        refused.close()
    assert not is_closed(first.join().connection)
    first.connection.close()


def test_a_hello_of_another_form_is_refused(reception, key):
    def greet(said: bytes) -> None:
        connection = Client(reception.address, authkey=key)
        connection.send_bytes(said)
        hung_up.append(is_hung_up_on(connection))
        connection.close()

    hung_up = []
    hellos = (b"", b"\0" * (HELLO.size - 1), b"\0" * 1000)
    callers = [threading.Thread(target=greet, args=(said,), daemon=True) for said in hellos]
    for caller in callers:
        caller.start()
    with pytest.raises(TimeoutError, match="no word from rank 0, 1"):
        receive(reception, 1.0)
    for caller in callers:
        caller.join(60)
    assert hung_up == [True] * len(hellos)


def test_pickles_are_no_messages(reception, key):
    ranks = [Rank(reception.address, key, rank) for rank in (0, 1)]
    callers = receive(reception)
    ranks[0].join().connection.send({"a": "pickle"})
    with pytest.raises(BadMessage):
        Channel(callers[0].connection).receive()
    close(callers, ranks)


def test_giving_up_and_closing_leave_no_socket(key):
    before = listening()
    reception = Listener(HOST, key, 2)
    port = reception.address[1]
    assert port in listening()
    assert reception.address[0] == HOST
    rank = Rank(reception.address, key, 0)

    def look():
        if rank.connection is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reception.receive(30.0, look)
    reception.close()
    reception.close()
    assert listening() == before
    assert is_hung_up_on(rank.connection)  # who was in already
    rank.connection.close()
    with pytest.raises(ConnectionError):
        dial((HOST, port), key, 1)
